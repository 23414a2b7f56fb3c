"""Owns time: the thread's CPU clock, quantiles, and the floor of the machine.

Before: a benchmark collects samples in nanoseconds. After: figures in microseconds under fixed names.
CPU time of the thread is what the work costs; wall time beside it is what a caller waits, other programs included.
Reading the CPU clock costs about 0.2 us on Linux, once per sample; `clock_cost_ns` measures it and nothing subtracts it.
"""

from collections.abc import Callable, Sequence
from itertools import repeat
from time import thread_time_ns

import numpy as np
from numpy.typing import NDArray

QUANTILES = {"p50": 0.5, "p99": 0.99, "p999": 0.999, "p9999": 0.9999, "max": 1.0}

Samples = NDArray[np.int64]
"""Durations in nanoseconds, one per step."""


def quantiles_us(name: str, samples: Samples | Sequence[int]) -> dict[str, float | None]:
    """`{name}_us_p50`, `_p99`, `_p999`, `_p9999`, `_max`: nearest-rank quantiles in microseconds.

    A quantile is null when there are too few samples for it to differ from the maximum.
    """
    ordered = np.sort(np.asarray(samples, dtype=np.int64))
    figures: dict[str, float | None] = {}
    for label, share in QUANTILES.items():
        beyond = len(ordered) * (1.0 - share)
        if share < 1.0 and beyond < 0.999:
            figures[f"{name}_us_{label}"] = None
            continue
        rank = min(len(ordered) - 1, int(np.ceil(share * len(ordered))) - 1)
        figures[f"{name}_us_{label}"] = round(float(ordered[rank]) / 1000, 3)
    return figures


def best_of(run: Callable[[], dict[str, float]], *, times: int = 3) -> dict[str, float]:
    """The smallest of each figure over `times` runs: those that Rust times by the wall clock grow with whatever else runs."""
    runs = [run() for _ in range(times)]
    return {name: min(figures[name] for figures in runs) for name in runs[0]}


def clock_cost_ns(rounds: int = 2000) -> int:
    """Median cost of reading the thread's CPU clock once."""
    costs = np.empty(rounds, np.int64)
    for i in range(rounds):
        start = thread_time_ns()
        costs[i] = thread_time_ns() - start
    return int(np.median(costs))


def floor_samples(p50_ns: int, count: int) -> Samples:
    """`count` samples of an empty loop whose median is `p50_ns`: what the machine itself adds to a tail."""
    turns = _turns_for(p50_ns)
    samples = np.empty(count, np.int64)
    for i in range(count):
        start = thread_time_ns()
        any(repeat(None, turns))
        samples[i] = thread_time_ns() - start
    return samples


def _turns_for(target_ns: int) -> int:
    """Turns of the empty loop that take `target_ns` at the median, found by two corrections."""
    turns = max(1, target_ns // 10)
    for _ in range(3):
        tries = np.empty(101, np.int64)
        for i in range(len(tries)):
            start = thread_time_ns()
            any(repeat(None, turns))
            tries[i] = thread_time_ns() - start
        turns = max(1, round(turns * target_ns / max(1, int(np.median(tries)))))
    return turns
