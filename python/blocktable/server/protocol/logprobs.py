"""Log probabilities as a client reads them; `sampling/logprobs.py` says what they are.

Before: `server/logprobs.py` writes them as these records would be. After: the replies, and the OpenAPI document.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from ...sampling.logprobs import LOWEST_LOGPROB

Number = Annotated[float, Meta(ge=LOWEST_LOGPROB, le=0)]
"""-9999 stands for minus infinity too."""

Byte = Annotated[int, Meta(ge=0, le=255)]


class TopLogprob(msgspec.Struct, frozen=True, kw_only=True):
    """Of one token."""

    token: str
    """Its text; a part of a character is U+FFFD."""
    logprob: Number
    bytes: list[Byte]
    """What it stands for in UTF-8, also where it is a part of a character."""


class ContentLogprob(msgspec.Struct, frozen=True, kw_only=True):
    """Of one output token of a chat."""

    token: str
    logprob: Number
    bytes: list[Byte]
    top_logprobs: list[TopLogprob]
    """The best tokens at its place, best first, as many as were asked for."""


class ChatLogprobs(msgspec.Struct, frozen=True, kw_only=True):
    """Of every output token: also of those whose text a stop string cut off, and of the one that ended the text."""

    content: list[ContentLogprob]
    refusal: None = None


class PromptLogprob(msgspec.Struct, frozen=True, kw_only=True):
    """Of one token at one place of a prompt, as vLLM has it."""

    logprob: Number
    rank: Annotated[int, Meta(ge=1)]
    """How many tokens were at least as probable, itself among them."""
    decoded_token: str


PromptLogprobs = list[dict[str, PromptLogprob] | None]
"""For each token of a prompt by token id, the token itself first; null for the first one, which nothing stands before."""


class CompletionLogprobs(msgspec.Struct, frozen=True, kw_only=True):
    """Of every output token, as of chats. A token that is a part of a character reads `bytes:\\xf0\\x9f`."""

    tokens: list[str]
    token_logprobs: list[Number]
    top_logprobs: list[dict[str, Number]]
    """The best tokens, and the output token itself."""
    text_offset: list[Annotated[int, Meta(ge=0)]]
    """Where in the text each begins, in characters; of the later parts of a character, where that begins."""
