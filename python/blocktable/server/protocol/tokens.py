"""`/tokenize` and `/detokenize`: a prompt's token ids, and a text of token ids, as the engine would read them."""

from __future__ import annotations

from typing import Annotated, ClassVar

import msgspec
from msgspec import Meta

from .chat import MAX_TOOLS, Message, TemplateVariables, Tool
from .generation import TokenId
from .not_served import Off


class TokenizeRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A text in `prompt`, or a conversation in `messages`."""

    OFF: ClassVar[Off] = {}

    model: str | None = None
    prompt: Annotated[str, Meta(min_length=1)] | None = None
    messages: Annotated[list[Message], Meta(min_length=1)] | None = None
    tools: Annotated[list[Tool], Meta(max_length=MAX_TOOLS)] | None = None
    add_generation_prompt: bool | None = None
    chat_template_kwargs: TemplateVariables | None = None
    add_special_tokens: bool | None = None
    """The model's begin and end tokens; true for a text, false for a conversation, unless said otherwise."""
    return_token_strs: bool | None = None


class TokenizeReply(msgspec.Struct, frozen=True, kw_only=True):
    """The ids."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None
    """How the vocabulary spells each, if asked for."""


class DetokenizeRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Token ids."""

    OFF: ClassVar[Off] = {}

    model: str | None = None
    tokens: list[TokenId]


class DetokenizeReply(msgspec.Struct, frozen=True):
    """Their text, special tokens included."""

    prompt: str
