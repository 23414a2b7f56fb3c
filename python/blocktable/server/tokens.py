"""`POST /tokenize` and `POST /detokenize`, and `POST /v1/embeddings` as long as it is refused.

Before: `endpoint.py` has read the body. After: it sends the reply.
"""

from __future__ import annotations

from .errors import ApiError, disagree
from .protocol.embeddings import EmbeddingReply, EmbeddingRequest
from .protocol.tokens import DetokenizeReply, DetokenizeRequest, TokenizeReply, TokenizeRequest
from .serving import Call, Serving


async def tokenize(serving: Serving, call: Call, ask: TokenizeRequest) -> TokenizeReply:
    """Token ids of a text or a conversation."""
    serving.model_name(ask.model)
    ids = await _ids(serving, ask)
    return TokenizeReply(
        count=len(ids),
        max_model_len=serving.engine.info.max_model_len,
        tokens=ids,
        token_strs=await serving.reader.spelled(ids) if ask.return_token_strs else None,
    )


async def detokenize(serving: Serving, call: Call, ask: DetokenizeRequest) -> DetokenizeReply:
    """The text of token ids."""
    serving.model_name(ask.model)
    return DetokenizeReply(prompt=await serving.reader.decode(ask.tokens))


async def embed(serving: Serving, call: Call, ask: EmbeddingRequest) -> EmbeddingReply:
    """Refused, once the model's name is right."""
    serving.model_name(ask.model)
    raise ApiError(400, "embeddings are not served yet", param="input", code="not_served")


async def _ids(serving: Serving, ask: TokenizeRequest) -> list[int]:
    if (ask.prompt is None) is (ask.messages is None):
        raise disagree("prompt", "either this or messages has to be given, and not both")
    if ask.messages is not None:
        return await serving.reader.chat(
            ask.messages,
            ask.tools,
            add_generation_prompt=ask.add_generation_prompt is not False,
            options=ask.chat_template_kwargs or {},
            add_special_tokens=bool(ask.add_special_tokens),
        )
    for name in ("tools", "add_generation_prompt", "chat_template_kwargs"):
        if getattr(ask, name) is not None:
            raise disagree(name, "goes with messages only")
    return await serving.reader.text("prompt", ask.prompt or "", add_special_tokens=ask.add_special_tokens is not False)
