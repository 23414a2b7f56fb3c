"""Follows one sequence in its grammar: which tokens may come next, and where the text is complete.

Before: `Grammar.guide` starts one at the beginning of a text. After: `sampler.py` masks the rows of a step by `allowed`, and
`hand_out.py` tells each guide the token that its sequence got. Always: a guide moves on with confirmed tokens only, so results
that were dropped, and rows that were computed twice, leave it where it is. What the guides of one grammar share, the states of
its lexer, one text may use up; the others then go on with states of their own.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Protocol

import numpy as np
from numpy.typing import NDArray

from .grammar_source import told

if TYPE_CHECKING:
    from llguidance import LLMatcher

OUT_OF_STATES = "too many states"
"""In llguidance's message where the limit of the lexer's states was met."""

REPLAY_S = 0.02
"""Seconds that the tokens of a text may take in a matcher that starts again: some 3 us each."""

REPLAYED_AT_ONCE = 64
"""Tokens between two looks at the clock."""


class Shared(Protocol):
    """What the guides of one grammar have in common."""

    is_spent: bool
    """One of its guides met a limit. The next one would meet that of the lexer's states, too: compile anew."""

    def start_again(self) -> LLMatcher | None:
        """A matcher at the start with states of its own; None where making one takes too long."""


class Guide:
    """Where one sequence stands in its grammar. One thread at a time.

    `allowed` [vocab]: which tokens may come next, those that go on and, where the grammar is satisfied, the ends. `is_over`:
    the text is complete and nothing can follow. `failure`: why it cannot go on, a limit that was passed; then it is over too.
    """

    def __init__(
        self,
        grammar: Shared,
        matcher: LLMatcher,
        first: NDArray[np.bool_],
        silent: NDArray[np.int64],
        end_ids: NDArray[np.int64],
    ) -> None:
        """`matcher` is at the start, and `first` its mask. `silent`: the tokenizer's ends, which are no text."""
        self._grammar = grammar
        self._matcher = matcher
        self._silent = silent
        self._end_ids = end_ids
        self._taken: list[int] | None = []  # None: its states are its own
        self.allowed = self._with_ends(first)
        self.is_over = False
        self.failure: str | None = None

    def take(self, token_id: int) -> None:
        """The sequence got this token, one of those that were allowed and none that ends it."""
        if self.is_over:
            return
        if self._taken is not None:
            self._taken.append(token_id)
        self._matcher.consume_token(token_id)
        allowed = self._next()
        if self._matcher.is_error() and self._taken is not None:
            self._grammar.is_spent = True
            if OUT_OF_STATES in self._matcher.get_error() and self._go_on_alone(self._taken):
                allowed = self._next()
            self._taken = None
        if allowed is not None:
            may_end = self._matcher.is_accepting()
            allowed[self._silent] = False
            self.allowed = self._with_ends(allowed)
            if not may_end and not self.allowed.any():
                self.failure = "none of the model's tokens goes on"
        # A mask that costs too much stops the matcher, too.
        if self._matcher.is_error():
            self.failure = told(self._matcher.get_error())
        self.is_over = self._matcher.is_stopped() or not self.allowed.any()

    def _next(self) -> NDArray[np.bool_] | None:
        """What the matcher lets follow; nothing where it has stopped."""
        return None if self._matcher.is_stopped() else bits(self._matcher.compute_bitmask(), len(self.allowed))

    def _go_on_alone(self, taken: list[int]) -> bool:
        """Bring a matcher with states of its own to this place, if it gets there in time. Once in a guide's life."""
        matcher, until = self._grammar.start_again(), time.monotonic() + REPLAY_S
        if matcher is None:
            return False
        for first in range(0, len(taken), REPLAYED_AT_ONCE):
            if time.monotonic() > until or not matcher.consume_tokens(taken[first : first + REPLAYED_AT_ONCE]):
                return False
        self._matcher = matcher
        return True

    def _with_ends(self, allowed: NDArray[np.bool_]) -> NDArray[np.bool_]:
        """An end may read as a text that goes on with the grammar; it ends all the same, so only where that is satisfied."""
        if not self._end_ids.size:
            return allowed
        allowed = allowed.copy()
        allowed[self._end_ids] = self._matcher.is_accepting()
        return allowed


def bits(mask: bytes, vocab_size: int) -> NDArray[np.bool_]:
    """[vocab] of a mask with a bit a token."""
    unpacked = np.unpackbits(np.frombuffer(mask, dtype=np.uint8), bitorder="little", count=vocab_size)
    return unpacked.view(np.bool_)
