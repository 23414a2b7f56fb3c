"""`/v1/completions`: prompts as text or token ids, continued."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

import msgspec
from msgspec import Meta

from .generation import GENERATION_OFF, MAX_N, GenerationRequest, NumLogprobs, TokenId
from .logprobs import CompletionLogprobs, PromptLogprobs
from .not_served import NotServed, Off
from .usage import Usage

Prompts = Annotated[
    list[Annotated[str, Meta(min_length=1)] | TokenId | Annotated[list[TokenId], Meta(min_length=1)]], Meta(min_length=1)
]
"""Texts, or token ids, or lists of token ids: one kind only, which `server/reader.py` sees to."""


class CompletionRequest(GenerationRequest, frozen=True, kw_only=True):
    """Prompts to continue. `max_tokens` left out is 16."""

    OFF: ClassVar[Off] = GENERATION_OFF | {"echo": (False,), "suffix": ("",)}

    prompt: Annotated[str, Meta(min_length=1)] | Prompts
    best_of: Annotated[int, Meta(ge=1, le=MAX_N)] | None = None
    """So many answers are made to each prompt, and the `n` best ones told, by the mean log probability of their tokens, best
    first. At least `n`; not streamed where it is more."""
    echo: NotServed = None
    logprobs: NumLogprobs | None = None
    """Log probabilities of so many best tokens at each place, beside that of the token itself."""
    suffix: NotServed = None

    @property
    def num_answers(self) -> int:
        """See `GenerationRequest`."""
        return self.best_of or self.n or 1

    @property
    def num_logprobs(self) -> int | None:
        """See `GenerationRequest`."""
        return self.logprobs


class CompletionChoice(msgspec.Struct, frozen=True, kw_only=True):
    """One answer; those of the first prompt come first."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: Literal["stop", "length", "abort"] | None
    """`abort`: `deadline_s` was over, the memory did not suffice for it alone, or its grammar cost too much;
    `stop_reason` tells which."""
    stop_reason: int | str | None = None
    """The stop string, the stop token id, `deadline`, `capacity`, `grammar`; null for the model's own end, and for
    a text whose shape is complete."""
    prompt_logprobs: PromptLogprobs | None = None
    """Of the prompt of this answer, if they were asked for and it was computed."""


class CompletionReply(msgspec.Struct, frozen=True, kw_only=True):
    """All answers."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage
