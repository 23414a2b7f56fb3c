"""Log probabilities of the tokens that a step chose, and of the best ones beside them.

Before: `sampler.py` has the logits of the rows that ask, as the model gave them, and what was chosen. After: a request's
`engine/token_logprobs.py` keeps its own. Always: they are those of the model's own distribution, the log-softmax of its logits
before temperature, penalties, biases and masks; no number is below `LOWEST_LOGPROB`, which stands for minus infinity too, and
none is NaN: a row whose logits have no log-softmax fails. Tokens stand in the order of falling logits, of equal ones the lower
id first, and a rank is a place in that order, from 1: so it is the same on every device.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]

LOWEST_LOGPROB = -9999.0
"""As vLLM's server has it: JSON knows no infinity."""

SPAN = 256
"""Logits whose largest stands for all of them when the best are looked for: 30 us for the five best of 49,152, a partition of
all took 240."""


@dataclass(frozen=True, slots=True)
class StepLogprobs:
    """Of the R entries of a step that asked and got a token. A row that asked for fewer reads the first of its columns."""

    entries: NDArray[np.intp]  # [R] places among the step's entries, ascending
    ids: NDArray[np.int32]  # [R, 1 + best] the chosen token, then the best ones
    values: Floats  # [R, 1 + best], each `LOWEST_LOGPROB`..0
    ranks: NDArray[np.int32]  # [R] of the chosen token

    def without(self, is_lost: NDArray[np.bool_]) -> StepLogprobs:
        """The same without those entries of the step that failed."""
        kept = ~is_lost[self.entries]
        return StepLogprobs(self.entries[kept], self.ids[kept], self.values[kept], self.ranks[kept])


def empty(entries: NDArray[np.intp], most: int) -> StepLogprobs:
    """Room for these entries and `most` best tokens of each."""
    count = len(entries)
    ids, values = np.zeros((count, 1 + most), dtype=np.int32), np.zeros((count, 1 + most), dtype=np.float32)
    return StepLogprobs(entries, ids, values, np.zeros(count, dtype=np.int32))


class RawRows(NamedTuple):
    """Logits as the model gave them, where numpy can read them."""

    rows: list[Floats]
    places: list[int]
    """Of each among the entries that ask."""


class HostLogprobs:
    """Reads rows that numpy can read. Owns its work space: one thread at a time."""

    def __init__(self, vocab_size: int) -> None:
        self._work: Floats = np.empty(vocab_size, dtype=np.float32)

    def read(self, told: StepLogprobs, rows: Sequence[Floats], places: Sequence[int], best: Sequence[int]) -> None:
        """Fill in `told` at `places`, whose raw logits are `rows`, each with so many `best` tokens; the chosen ones stand there
        already. A row that has no log-softmax is NaN afterwards."""
        for raw, place, count in zip(rows, places, best):
            log_sum = self._log_sum(raw)
            if math.isnan(log_sum):
                told.values[place] = np.nan
                continue
            chosen = int(told.ids[place, 0])
            told.ids[place, 1 : 1 + count] = _best(raw, count)
            ids = told.ids[place, : 1 + count]
            told.values[place, : 1 + count] = np.maximum(raw[ids].astype(np.float64) - log_sum, LOWEST_LOGPROB)
            told.ranks[place] = 1 + np.count_nonzero(raw > raw[chosen]) + np.count_nonzero(raw[:chosen] == raw[chosen])

    def _log_sum(self, raw: Floats) -> float:
        """NaN unless it is finite."""
        largest = float(raw.max())
        if not math.isfinite(largest):
            return math.nan
        np.subtract(raw, np.float32(largest), out=self._work)
        with np.errstate(under="ignore"):
            np.exp(self._work, out=self._work)
        return largest + math.log(float(self._work.sum()))


def _best(raw: Floats, count: int) -> NDArray[np.intp]:
    """The `count` best tokens in their order."""
    if count == 0:
        return np.zeros(0, dtype=np.intp)
    whole = len(raw) - len(raw) % SPAN
    spans = raw[:whole].reshape(-1, SPAN).max(axis=1)
    if count > len(spans):
        found = np.arange(len(raw))
    else:
        # So many spans have a logit of at least this one.
        floor = np.partition(spans, len(spans) - count)[len(spans) - count]
        found = np.flatnonzero(raw >= floor)
    return found[np.argsort(-raw[found], kind="stable")[:count]]
