"""One row's choice: logits, four options and one random number in, one token id out.

Before: `sampler.py` hands over the rows that are not greedy, one after the other. After: nothing; no state is kept but
work space. A row is read alone, so no neighbour can change its result; one row of 49,152 float32 logits (192 KiB) also
stays in a core's cache, which all rows of a step together do not.

The order is vLLM's: temperature, then min_p, top_k, top_p, each narrowing what the one before left. Every one of them is
a threshold on the probability: tokens that tie at the edge stay, as with vLLM and transformers for top_k. What is left is
drawn by inverting its cumulative distribution in ascending order of ids, so that the order of ties cannot matter.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]
Doubles = NDArray[np.float64]
Ids = NDArray[np.intp]

SPAN = 256
"""Weights that are summed first when all tokens take part: a running sum of doubles over 49,152 floats took 690 us, the
sums of its spans and a running sum of those 35 us."""

HEADS = (1024, 8192)
"""Best tokens that top_p looks at before it sorts all: nearly always enough, and 83 us against 380 us at 49,152."""


class RowDraw:
    """Draws one token from one row. Owns its work space: one thread at a time."""

    def __init__(self, vocab_size: int) -> None:
        self._size = vocab_size
        padded = -(-vocab_size // SPAN) * SPAN
        self._scores: Floats = np.empty(vocab_size, dtype=np.float32)
        self._sorted: Floats = np.empty(vocab_size, dtype=np.float32)
        # Weights behind the vocabulary stay 0: they pad the last span.
        self._padded_weights: Floats = np.zeros(padded, dtype=np.float32)
        self._weights = self._padded_weights[:vocab_size]

    def draw(
        self, logits: Floats, best: float, uniform: float, *, temperature: float, min_p: float, top_k: int, top_p: float
    ) -> int:
        """The token id that `uniform` (0 <= u < 1) falls on.

        `logits` [V] float32, -inf where a token is masked, is only read; `best` is its largest value and finite.
        `temperature` is at least `params.GREEDY_BELOW`; `top_k` 0 = off; `min_p` 0 = off; `top_p` 1 = off.
        """
        with np.errstate(over="ignore", under="ignore"):  # a token too far behind gets the weight 0
            np.subtract(logits, np.float32(best), out=self._scores)
            np.divide(self._scores, np.float32(temperature), out=self._scores)
            if 0 < top_k < self._size:
                ids, weights = self._best(top_k)
                ids, weights = _at_least(min_p, ids, weights)
            else:
                np.exp(self._scores, out=self._weights)
                if min_p == 0.0 and top_p == 1.0:
                    return _invert_in_spans(self._padded_weights, uniform)
                # Without min_p the nucleus of all tokens is the narrower floor, and the only one.
                floor = min_p if min_p > 0.0 else self._nucleus_floor(top_p)
                ids = np.flatnonzero(self._weights >= np.float32(floor))
                weights = self._weights[ids].astype(np.float64)
        if top_p < 1.0 and (top_k > 0 or min_p > 0.0):
            ids, weights = _at_least(_floor_of(weights, top_p * weights.sum()), ids, weights)
        return int(ids[_invert(weights, uniform)])

    def _best(self, top_k: int) -> tuple[Ids, Doubles]:
        """Ids, ascending, and weights of the `top_k` best tokens and of those that tie with the last of them."""
        np.copyto(self._sorted, self._scores)
        self._sorted.partition(self._size - top_k)
        ids = np.flatnonzero(self._scores >= self._sorted[self._size - top_k])
        return ids, np.exp(self._scores[ids].astype(np.float64))

    def _nucleus_floor(self, top_p: float) -> float:
        """Smallest weight of the nucleus of all tokens. Sorts no more of them than a guess needs that is big enough."""
        share = top_p * float(self._weights.sum(dtype=np.float64))
        np.copyto(self._sorted, self._weights)
        for head in HEADS:
            if 2 * head > self._size:
                break
            self._sorted.partition(self._size - head)
            best = self._sorted[self._size - head :]
            if best.sum(dtype=np.float64) >= share:
                return _floor_of(best, share)
        return _floor_of(self._sorted, share)


def _at_least(floor: float, ids: Ids, weights: Doubles) -> tuple[Ids, Doubles]:
    kept = weights >= floor
    return ids[kept], weights[kept]


def _floor_of(weights: Floats | Doubles, share: float) -> float:
    """Smallest weight of the smallest set of largest weights that together reach `share`; at least one weight, at most all."""
    falling = np.sort(weights)[::-1].astype(np.float64)
    place = int(np.searchsorted(np.cumsum(falling), share, side="left"))
    return float(falling[min(place, len(falling) - 1)])


def _invert(weights: Doubles, uniform: float) -> int:
    """Index that `uniform` falls on when each index has a share of [0, 1) in proportion to its weight."""
    sums = np.cumsum(weights)
    place = int(np.searchsorted(sums, uniform * sums[-1], side="right"))
    if place < len(sums):
        return place
    # Rounding met the end: the last index that has a weight.
    return int(np.searchsorted(sums, sums[-1], side="left"))


def _invert_in_spans(padded: Floats, uniform: float) -> int:
    """`_invert` of many weights: first the span of `SPAN` weights, then the index in it. The length is a multiple of it."""
    spans = padded.reshape(-1, SPAN)
    sums = np.cumsum(spans.sum(axis=1, dtype=np.float64))
    target = uniform * sums[-1]
    place = min(int(np.searchsorted(sums, target, side="right")), int(np.searchsorted(sums, sums[-1], side="left")))
    before = sums[place - 1] if place else 0.0
    inner = np.cumsum(spans[place].astype(np.float64))
    index = int(np.searchsorted(inner, target - before, side="right"))
    last = int(np.searchsorted(inner, inner[-1], side="left"))
    return place * SPAN + min(index, last)
