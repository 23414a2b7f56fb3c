"""What a request gives back, in the shape of vLLM's `RequestOutput`.

Before: `live_request.py` fills one in. After: the caller; nothing in the engine reads it again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from .token_logprobs import Logprob, TokenLogprobs

if TYPE_CHECKING:
    from ..text.tokenizer import Tokenizer

FinishReason = Literal["stop", "length", "abort", "refused", "error"]
"""Why an output ended, a closed table: `stop` an end token or a stop string; `length` max_tokens or the model's length;
`abort` the caller gave up, its deadline was over, or the blocks did not suffice for it alone; `refused` its queue deadline was
over before it was admitted; `error` its step failed or its logits held no choice."""


@dataclass(slots=True)
class CompletionOutput:
    """One answer to a prompt."""

    index: int
    """Which answer of its request, from 0."""
    text: str
    """What the tokens say, cut before a stop string."""
    token_ids: Sequence[int]
    """Every output token, the one that ended it included."""
    cumulative_logprob: float | None = None
    """Of all its tokens so far together; None if none were asked for."""
    finish_reason: FinishReason | None = None
    """None while it goes on."""
    stop_reason: int | str | None = None
    """The stop string or the stop token id that ended it, and None for the model's own end token. Of an abort: `deadline`,
    `capacity`, or None if it was asked for. None for all other ends."""
    token_logprobs: TokenLogprobs | None = None
    """Log probabilities of `token_ids`, packed; None if none were asked for."""
    tokenizer: Tokenizer | None = field(default=None, repr=False, compare=False)
    """Spells `logprobs`."""

    _shown: list[dict[int, Logprob]] | None = field(default=None, init=False, repr=False, compare=False)

    @property
    def logprobs(self) -> list[dict[int, Logprob]] | None:
        """For each of `token_ids` the log probabilities of it and of the best tokens, by token id: see
        `SamplingParams.logprobs`. Unpacked when it is read first; None if none were asked for."""
        if self._shown is None and self.token_logprobs is not None:
            decode = None if self.tokenizer is None else self.tokenizer.token_text
            self._shown = self.token_logprobs.by_token(decode)
        return self._shown

    def finished(self) -> bool:
        """Whether it has ended."""
        return self.finish_reason is not None

    def __getstate__(self) -> tuple[None, dict[str, object]]:
        """What of it is copied or travels: its log probabilities as they are shown, and no tokenizer."""
        state = {name: getattr(self, name) for name in self.__slots__}
        return None, state | {"_shown": self.logprobs, "tokenizer": None}


@dataclass(slots=True)
class RequestMetrics:
    """When things happened to a request: seconds of one monotonic clock. A time is None until it has come."""

    arrival_time: float
    """Submitted."""
    scheduled_ts: float | None = None
    """The plan that admitted it for the first time."""
    first_token_ts: float | None = None
    """The commit that brought its first output token."""
    last_token_ts: float | None = None
    """The commit that brought its latest output token."""
    num_generation_tokens: int = 0
    """Output tokens so far."""
    num_preemptions: int = 0
    """Times that it lost its blocks and was computed again."""
    preempted: Sequence[tuple[float, float]] = ()
    """From when to when it had lost them, each time that it got blocks again."""

    def add_tokens(self, count: int, now: float) -> None:
        """`count` output tokens came at `now`."""
        if count == 0:
            return
        if self.first_token_ts is None:
            self.first_token_ts = now
        self.last_token_ts = now
        self.num_generation_tokens += count

    @property
    def ttft_s(self) -> float | None:
        """Seconds from arrival to the first token."""
        return None if self.first_token_ts is None else self.first_token_ts - self.arrival_time

    @property
    def tokens_per_s(self) -> float | None:
        """Output tokens a second from arrival to the latest token: what its caller saw, waiting included."""
        if self.last_token_ts is None or self.last_token_ts <= self.arrival_time:
            return None
        return self.num_generation_tokens / (self.last_token_ts - self.arrival_time)


@dataclass(slots=True)
class RequestOutput:
    """A request and its answers."""

    request_id: str
    prompt: str | None
    """None if only token ids were given."""
    prompt_token_ids: list[int] | None
    outputs: list[CompletionOutput]
    finished: bool
    """Whether all its answers have ended."""
    metrics: RequestMetrics | None = None
    num_cached_tokens: int | None = None
    """Prompt tokens that were found in the prefix cache at its first admission; None before."""
    prompt_token_logprobs: TokenLogprobs | None = None
    """Log probabilities of `prompt_token_ids` but the first, packed; None if none were asked for, and before the prompt is
    computed."""
    tokenizer: Tokenizer | None = field(default=None, repr=False, compare=False)
    """Spells `prompt_logprobs`."""

    _shown: list[dict[int, Logprob] | None] | None = field(default=None, init=False, repr=False, compare=False)

    @property
    def prompt_logprobs(self) -> list[dict[int, Logprob] | None] | None:
        """For each of `prompt_token_ids` what `CompletionOutput.logprobs` has for each output token; None for the first one,
        which nothing stands before. See `SamplingParams.prompt_logprobs`."""
        if self._shown is None and self.prompt_token_logprobs is not None:
            decode = None if self.tokenizer is None else self.tokenizer.token_text
            self._shown = [None, *self.prompt_token_logprobs.by_token(decode)]
        return self._shown

    def __getstate__(self) -> tuple[None, dict[str, object]]:
        """See `CompletionOutput`."""
        state = {name: getattr(self, name) for name in self.__slots__}
        return None, state | {"_shown": self.prompt_logprobs, "tokenizer": None}
