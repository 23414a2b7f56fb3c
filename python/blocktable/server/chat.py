"""`POST /v1/chat/completions`.

Before: `endpoint.py` has read the body. After: it sends the reply, or the events, that come from here.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from .errors import disagree
from .generation import Generation, Tally, check_together
from .logprobs import NO_LOGPROBS, ChatWriter, as_record
from .protocol.chat import Answer, ChatChoice, ChatReply, ChatRequest
from .serving import Call, Serving
from .sse import Events, Last


async def chat(serving: Serving, call: Call, ask: ChatRequest) -> ChatReply | AsyncGenerator[bytes, None]:
    """All answers, or a stream of their events."""
    serving.check_takes()
    serving.model_name(ask.model)
    sampling = _sampling(ask)
    check_together(serving, ask, sampling)
    prompt = await serving.reader.chat(
        ask.messages,
        None if ask.tool_choice == "none" else ask.tools,
        add_generation_prompt=ask.add_generation_prompt is not False,
        options=ask.chat_template_kwargs or {},
    )
    generation = Generation(serving, call, ask, prefix="chatcmpl", prompts=[prompt], sampling=sampling)
    if ask.num_logprobs is not None:
        generation.writer = ChatWriter(await serving.reader.speller())
    if ask.stream:
        return _events(generation, includes_usage=ask.includes_usage)
    await generation.to_the_end()
    return ChatReply(
        id=generation.id,
        created=generation.created,
        model=generation.model,
        choices=[_choice(place, tally) for place, tally in enumerate(generation.tallies)],
        usage=generation.usage,
    )


def _sampling(ask: ChatRequest) -> dict[str, Any]:
    if ask.top_logprobs and not ask.logprobs:
        raise disagree("top_logprobs", "goes with logprobs=true only")
    given = ask.max_completion_tokens
    if given is not None and ask.max_tokens not in (None, given):
        raise disagree("max_completion_tokens", f"{given} is the same as max_tokens, which says {ask.max_tokens}")
    # None is as many as the model's length leaves.
    return {"max_tokens": None} | ask.sampling() | ({} if given is None else {"max_tokens": given})


async def _events(generation: Generation, *, includes_usage: bool) -> AsyncGenerator[bytes, None]:
    events, last = Events(generation, "chat.completion.chunk", includes_usage=includes_usage), b""
    begun: set[int] = set()
    async with aclosing(generation.pieces()) as pieces:
        async for place, piece in pieces:
            role = b"" if place in begun else events.role(place)
            begun.add(place)
            logprobs = NO_LOGPROBS if piece.logprobs is None else await generation.written(place, piece.logprobs)
            if generation.is_over:  # what follows is no wait, and goes along
                last = role + events.content(place, piece, logprobs)
            elif role or piece.text or piece.finish_reason is not None or logprobs is not NO_LOGPROBS:
                # A token may be half a character: then its text is nothing to tell yet.
                yield role + events.content(place, piece, logprobs)
    yield Last(last + events.end())


def _choice(place: int, tally: Tally) -> ChatChoice:
    answer = Answer(content=tally.text)
    return ChatChoice(
        index=place,
        message=answer,
        logprobs=as_record(tally.logprobs),
        finish_reason=tally.finish_reason,
        stop_reason=tally.stop_reason,
    )
