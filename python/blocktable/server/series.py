"""What a metric is: its name, what it means, and where its value is read.

Before: `metrics.py` gathers the sources of one scrape. After: the tables of `vllm_series.py` and `own_series.py` are made of
these. Always: reading computes nothing in a step; what the engine did not tell is read from nowhere.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from .engine_client import EngineInfo, EngineState, Progress
from .histogram import Histogram
from .refusals import Refusals
from .request_watch import RequestFigures

Values = Iterable[tuple[tuple[str, ...], float]]
"""(values of the labels, value)"""


@dataclass(frozen=True, slots=True)
class Sources:
    """What is read for one scrape. `engine` is None if the engine did not answer."""

    engine: Mapping[str, Any] | None
    requests: RequestFigures
    refusals: Refusals
    progress: Progress
    state: EngineState
    info: EngineInfo | None
    num_deaths: int
    lost_log_lines: int

    @property
    def stats(self) -> Mapping[str, int]:
        """The core's counters."""
        stats: Mapping[str, int] = {} if self.engine is None else self.engine["stats"]
        return stats


@dataclass(frozen=True, slots=True)
class Series:
    """One metric. Counters are told with `_total` behind their names."""

    name: str
    kind: Literal["gauge", "counter", "histogram"]
    meaning: str
    read: Callable[[Sources], Values | Histogram]
    labels: tuple[str, ...] = ()
    of_engine: bool = True
    """Left out while the engine does not answer."""


def stat(name: str, scale: float = 1.0) -> Callable[[Sources], Values]:
    """A counter of the core, times `scale`."""
    return lambda sources: [((), sources.stats[name] * scale)]


def stats(names: Mapping[str, str]) -> Callable[[Sources], Values]:
    """Counters of the core, by the values of one label."""
    return lambda sources: [((label,), sources.stats[name]) for label, name in names.items()]


def ratio(part: str, whole: Callable[[Mapping[str, int]], int]) -> Callable[[Sources], Values]:
    """A counter of the core as a part of what `whole` makes of all."""
    return lambda sources: [((), sources.stats[part] / max(whole(sources.stats), 1))]


def usable_blocks(stats: Mapping[str, int]) -> int:
    """Blocks without the null block."""
    return stats["num_blocks"] - 1


def one(value: Callable[[Sources], float]) -> Callable[[Sources], Values]:
    """One number without labels."""
    return lambda sources: [((), value(sources))]
