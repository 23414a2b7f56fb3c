"""Log probabilities of one answer's tokens: packed while the engine has them, and as vLLM shows them when somebody reads.

Before: `hand_out.py` brings those of each confirmed token (`sampling/logprobs.py` says what they are). After:
`CompletionOutput.logprobs`; the server sends them on packed. Always: there is one for each output token that was confirmed,
whatever was computed again meanwhile; none is outside `LOWEST_LOGPROB`..0.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from ..sampling.logprobs import StepLogprobs


@dataclass(frozen=True, slots=True)
class Logprob:
    """Of one token at one place of an answer, by vLLM's names."""

    logprob: float
    """`LOWEST_LOGPROB`..0."""
    rank: int
    """How many tokens were at least as probable, itself among them; 1 is the best one."""
    decoded_token: str | None = None
    """Its text, read alone: part of a character is U+FFFD. None without a tokenizer."""


@dataclass(slots=True)
class TokenLogprobs:
    """Of N output tokens, for each its own and those of the `num_best` best ones, best first. 8 bytes each."""

    num_best: int
    ids: bytearray = field(default_factory=bytearray, repr=False)  # [N, 1 + num_best] int32
    values: bytearray = field(default_factory=bytearray, repr=False)  # [N, 1 + num_best] float32
    ranks: bytearray = field(default_factory=bytearray, repr=False)  # [N] int32, of the tokens themselves

    def __len__(self) -> int:
        return len(self.ranks) // 4

    def extend(self, other: TokenLogprobs) -> None:
        """Those of the tokens that came next."""
        self.ids += other.ids
        self.values += other.values
        self.ranks += other.ranks

    def copy(self) -> TokenLogprobs:
        """The same, of one's own."""
        return TokenLogprobs(self.num_best, self.ids[:], self.values[:], self.ranks[:])

    def by_token(self, decode: Callable[[int], str] | None) -> list[dict[int, Logprob]]:
        """For each output token a mapping of token ids, its own first, then the best ones."""
        width = 1 + self.num_best
        ids = np.frombuffer(self.ids, dtype=np.int32).reshape(-1, width).tolist()
        values = np.frombuffer(self.values, dtype=np.float32).reshape(-1, width).tolist()
        ranks = np.frombuffer(self.ranks, dtype=np.int32).tolist()
        texts: dict[int, str | None] = {}
        shown = []
        for own_ids, own_values, rank in zip(ids, values, ranks):
            one: dict[int, Logprob] = {}
            for place, (token_id, value) in enumerate(zip(own_ids, own_values)):
                if token_id not in texts:
                    texts[token_id] = None if decode is None else decode(token_id)
                # The own one stands at place 0, the best at the place that is its rank.
                one.setdefault(token_id, Logprob(value, place or rank, texts[token_id]))
            shown.append(one)
        return shown


class LogprobLog:
    """Those of a request that runs. A streamed one keeps what it has not handed out, any other all."""

    __slots__ = ("_fresh", "_num_best", "cumulative")

    def __init__(self, num_best: int) -> None:
        self._num_best = num_best
        self._fresh = TokenLogprobs(num_best)
        self.cumulative = 0.0
        """Of all its tokens together."""

    def add(self, told: StepLogprobs, place: int) -> None:
        """Of one more token: those at `place` of a step's."""
        width = 1 + self._num_best
        fresh = self._fresh
        fresh.ids += told.ids[place, :width].tobytes()
        fresh.values += told.values[place, :width].tobytes()
        fresh.ranks += told.ranks[place : place + 1].tobytes()
        self.cumulative += float(told.values[place, 0])

    def take(self) -> TokenLogprobs:
        """What came since the last time."""
        taken, self._fresh = self._fresh, TokenLogprobs(self._num_best)
        return taken
