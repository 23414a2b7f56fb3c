"""Counts of values by size, in the shape in which Prometheus reads them.

Before: `request_watch.py` observes. After: `metrics.py` reads. Always: used on one event loop, so that it needs no lock;
observing costs a search among some twenty bounds, and allocates nothing.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

SHORT_S = (0.001, 0.0025, 0.005, 0.0075, 0.01, 0.015, 0.025, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 10.0)
"""Bounds for the time between two tokens."""

FIRST_S = (
    0.001,
    0.005,
    0.01,
    0.02,
    0.04,
    0.06,
    0.08,
    0.1,
    0.25,
    0.5,
    0.75,
    1.0,
    2.5,
    5.0,
    7.5,
    10.0,
    20.0,
    40.0,
    80.0,
    160.0,
    640.0,
)
"""Bounds for the time to the first token."""

WHOLE_S = (0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 60.0, 120.0, 240.0, 480.0, 960.0, 1920.0)
"""Bounds for a whole request."""

COUNTS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000, 200_000)
"""Bounds for tokens."""


class Histogram:
    """How many values were at most each of `bounds`, and their sum."""

    __slots__ = ("_bounds", "_counts", "sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = tuple(bounds)
        self._counts = [0] * (len(self._bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        """This value, so often."""
        self._counts[bisect_left(self._bounds, value)] += times
        self.sum += value * times

    @property
    def count(self) -> int:
        """Values so far."""
        return sum(self._counts)

    def buckets(self) -> list[tuple[str, float]]:
        """(bound, values at most that), the last bound being +Inf."""
        told, total = [], 0
        for bound, count in zip([*map(str, self._bounds), "+Inf"], self._counts):
            total += count
            told.append((bound, float(total)))
        return told
