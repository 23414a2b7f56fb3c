"""What one request changes in its logits: a bias, penalties for what was said, what it must not say, all that it may say.

Before: `sampler.py` makes one for a row that asks for any of this, and for no other; it is told of the prompt, of what the
request had made before, and then of every output token that was confirmed. After: the row's logits, changed where they are.
Always: the history is the prompt and the confirmed outputs, whatever of them was cached, computed in chunks, or computed again;
what a row costs grows with its own different tokens, never with its neighbours or with the vocabulary.

Formulas and their order are vLLM's. With v a logit, plus its bias: v / r if v > 0, else v * r, where r is the repetition
penalty, of every token of prompt or output; then v - frequency * (times in the output) - presence, of every token of the
output. Tokens that may not be chosen get -inf. All in float32, each step rounded, so that every device gives the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from .params import ResolvedSampling

Floats = NDArray[np.float32]
Ids = NDArray[np.int64]

FIRST_ROOM = 64
"""Tokens that there is room for at first beside those that are known at the start; doubled as needed."""


class Changes(NamedTuple):
    """Of some tokens' logits: `v = logit + add`, then `(v / divide if v > 0 else v * divide) - subtract`. Each token once."""

    ids: Ids  # [M]
    add: Floats  # [M]
    divide: Floats  # [M], 1 where the token was not said
    subtract: Floats  # [M]


class RowRules:
    """Of one row. One thread at a time."""

    def __init__(
        self,
        resolved: ResolvedSampling,
        prompt: NDArray[np.integer] | None = None,
        outputs: NDArray[np.integer] | None = None,
    ) -> None:
        """`prompt` [T] token ids; `outputs` [N] what the request has made so far."""
        allowed = resolved.allowed_token_ids
        self.allowed: Ids | None = None if allowed is None else np.array(allowed, dtype=np.int64)
        """The only tokens that may be chosen."""
        self._bad_words = resolved.bad_words_token_ids
        # Of the outputs only as many are kept as the longest bad word has before its last token.
        self._tail_length = max(map(len, self._bad_words), default=1) - 1
        said = _NO_IDS if outputs is None else outputs
        self._tail: list[int] = said[max(len(said) - self._tail_length, 0) :].tolist()
        self._has_penalties = resolved.has_penalties
        self._presence = resolved.presence_penalty
        self._frequency = resolved.frequency_penalty
        self._repetition = np.float32(resolved.repetition_penalty)
        in_prompt = _distinct(prompt) if self._repetition != 1.0 else _NO_IDS
        self._start(resolved.logit_bias, in_prompt, *np.unique(said if self._has_penalties else _NO_IDS, return_counts=True))

    def note(self, token_id: int) -> None:
        """The output has one more token."""
        if self._tail_length:
            self._tail = [*self._tail, token_id][-self._tail_length :]
        if not self._has_penalties:
            return
        place = self._places.get(token_id)
        if place is None:
            place = self._places[token_id] = self._place_of(token_id)
        self._counts[place] += 1
        self._divide[place] = self._repetition
        self._subtract[place] = self._frequency * int(self._counts[place]) + self._presence

    def banned(self) -> list[int]:
        """The tokens that would complete a bad word now."""
        tail = self._tail
        return [word[-1] for word in self._bad_words if len(word) == 1 or _ends_with(tail, word[:-1])]

    def changes(self) -> Changes:
        """As they are now: views, which the next `note` may change."""
        count = self._num_ids
        return Changes(self._ids[:count], self._add[:count], self._divide[:count], self._subtract[:count])

    def apply(self, logits: Floats) -> None:
        """Change a row [V] where it is."""
        if self.allowed is not None:
            kept = logits[self.allowed]
            logits.fill(-np.inf)
            logits[self.allowed] = kept
        banned = self.banned()
        if banned:
            logits[banned] = -np.inf
        ids, add, divide, subtract = self.changes()
        if ids.size:
            values = logits[ids] + add
            logits[ids] = np.where(values > 0, values / divide, values * divide) - subtract

    def _start(
        self, biases: Sequence[tuple[int, float]], in_prompt: Ids, said: NDArray[np.integer], counts: NDArray[np.intp]
    ) -> None:
        """The tokens that are known from the start, ascending: those with a bias, those of the prompt, and those that were
        `said`, so often."""
        biased = np.array([token_id for token_id, _ in biases], dtype=np.int64)
        known = np.unique(np.concatenate([biased, in_prompt, said.astype(np.int64)]))
        self._num_known = self._num_ids = len(known)
        room = self._num_ids + (FIRST_ROOM if self._has_penalties else 0)
        self._ids: Ids = np.zeros(room, dtype=np.int64)
        self._ids[: len(known)] = known
        self._add: Floats = np.zeros(room, dtype=np.float32)
        self._add[np.searchsorted(known, biased)] = [bias for _, bias in biases]
        self._divide: Floats = np.ones(room, dtype=np.float32)
        self._divide[np.searchsorted(known, in_prompt)] = self._repetition
        self._subtract: Floats = np.zeros(room, dtype=np.float32)
        self._counts = np.zeros(room, dtype=np.int64)
        places = np.searchsorted(known, said)
        self._counts[places] = counts
        self._divide[places] = self._repetition
        self._subtract[places] = self._frequency * counts + self._presence
        self._places = dict(zip(said.tolist(), places.tolist()))  # of the tokens of the output

    def _place_of(self, token_id: int) -> int:
        """Where a token stands that the output has for the first time: among the known ones, or behind all."""
        place = int(np.searchsorted(self._ids[: self._num_known], token_id))
        if place < self._num_known and self._ids[place] == token_id:
            return place
        if self._num_ids == len(self._ids):
            self._grow()
        place, self._num_ids = self._num_ids, self._num_ids + 1
        self._ids[place] = token_id
        return place

    def _grow(self) -> None:
        more = len(self._ids)
        self._ids, self._counts = np.pad(self._ids, (0, more)), np.pad(self._counts, (0, more))
        self._add, self._subtract = np.pad(self._add, (0, more)), np.pad(self._subtract, (0, more))
        self._divide = np.pad(self._divide, (0, more), constant_values=1)


_NO_IDS: Ids = np.zeros(0, dtype=np.int64)


def _distinct(prompt: NDArray[np.integer] | None) -> Ids:
    """Each token of the prompt once, ascending: a count of each is several times faster than sorting."""
    if prompt is None or not len(prompt):
        return _NO_IDS
    return np.flatnonzero(np.bincount(prompt)).astype(np.int64, copy=False)


def _ends_with(tail: list[int], word: tuple[int, ...]) -> bool:
    return len(tail) >= len(word) and tuple(tail[len(tail) - len(word) :]) == word
