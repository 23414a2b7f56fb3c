"""The KV report: how the blocks were used and what planning cost, since the engine started.

Before: `step_loop.py` times its two crossings here; the core's `stats()` holds the running sums. After: `LLM.kv_report()`,
the CLI's last lines. Nothing is allocated when a step is timed; the percentiles are worked out when somebody asks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

RING_STEPS = 65_536
"""Steps whose times are kept (1.5 MiB): the percentiles are of the last so many."""


class StepTimes:
    """What steps took: sums of each phase since the start, and `plan` and `commit` of the last `RING_STEPS` steps in one
    preallocated ring. Nanoseconds by the wall, but for the CPU time of the calling thread in plan and commit together."""

    __slots__ = ("_commit", "_count", "_cpu", "_hand_out", "_model", "_plan", "_ring", "_sample")

    def __init__(self) -> None:
        self._ring: NDArray[np.int64] = np.zeros((3, RING_STEPS), dtype=np.int64)
        self._count = 0
        self._plan = self._model = self._sample = self._commit = self._hand_out = self._cpu = 0

    def add(self, plan_ns: int, commit_ns: int, *, cpu_ns: int = 0, model_ns: int = 0, sample_ns: int = 0) -> None:
        """Keep the times of one step; `cpu_ns` is of plan and commit together."""
        column = self._count % RING_STEPS
        self._ring[0, column] = plan_ns
        self._ring[1, column] = commit_ns
        self._ring[2, column] = cpu_ns
        self._count += 1
        self._plan += plan_ns
        self._model += model_ns
        self._sample += sample_ns
        self._commit += commit_ns
        self._cpu += cpu_ns

    def add_hand_out(self, hand_out_ns: int) -> None:
        """Keep what it took to make text of a step's tokens, and to hand it out."""
        self._hand_out += hand_out_ns

    def phases_ns(self) -> dict[str, int]:
        """Nanoseconds since the start in each phase of a step: `plan`, `model` (the wait for its logits), `sample`, `commit`,
        `hand_out`."""
        return {
            "plan": self._plan,
            "model": self._model,
            "sample": self._sample,
            "commit": self._commit,
            "hand_out": self._hand_out,
        }

    def cpu_ns(self) -> int:
        """CPU nanoseconds of plan and commit since the start."""
        return self._cpu

    def plan_us(self, percentile: float) -> float:
        """Microseconds of `plan` at this percentile; 0.0 before the first step."""
        return self._percentile_us(0, percentile)

    def commit_us(self, percentile: float) -> float:
        """Microseconds of `commit` at this percentile; 0.0 before the first step."""
        return self._percentile_us(1, percentile)

    def cpu_us(self, percentile: float) -> float:
        """CPU microseconds of plan and commit together at this percentile; 0.0 before the first step."""
        return self._percentile_us(2, percentile)

    def _percentile_us(self, row: int, percentile: float) -> float:
        kept = min(self._count, RING_STEPS)
        if kept == 0:
            return 0.0
        return float(np.percentile(self._ring[row, :kept], percentile)) / 1000.0


@dataclass(frozen=True, slots=True, kw_only=True)
class KVReport:
    """How the KV blocks were used since the engine started. Counts are of blocks, steps and events; shares in percent."""

    block_size: int
    """Tokens a block."""
    num_blocks: int
    """Blocks in all, the null block among them."""
    peak_blocks: int
    """Most blocks that were held at once."""
    used_blocks: int
    """Blocks held now: 0 when nothing runs."""
    bytes_per_block: int
    """Bytes of one block over all layers."""
    wasted_rows_percent: float
    """Of the rows of held blocks, those without a token: summed over steps, a shared block counted once."""
    prefix_hit_percent: float
    """Of the prompt tokens that were looked up in the prefix cache, those that were found."""
    preemptions: int
    steps: int
    failed_steps: int
    plan_us_p50: float
    plan_us_p99: float
    commit_us_p50: float
    commit_us_p99: float

    def as_dict(self) -> dict[str, Any]:
        """The same as one flat JSON object."""
        return asdict(self)

    def __str__(self) -> str:
        mebibytes = self.num_blocks * self.bytes_per_block / 2**20
        share = 100.0 * self.peak_blocks / max(self.num_blocks - 1, 1)
        rows = [
            ("blocks", f"{self.num_blocks} in all ({self.block_size} tokens each, {mebibytes:.1f} MiB together)"),
            ("at peak", f"{self.peak_blocks} blocks ({share:.1f} %), {self.used_blocks} held now"),
            ("rows wasted", f"{self.wasted_rows_percent:.2f} %"),
            ("prefix hit rate", f"{self.prefix_hit_percent:.1f} %"),
            ("preemptions", f"{self.preemptions}"),
            ("steps", f"{self.steps}, {self.failed_steps} failed"),
            ("plan time", f"p50 {self.plan_us_p50:.1f} us, p99 {self.plan_us_p99:.1f} us"),
            ("commit time", f"p50 {self.commit_us_p50:.1f} us, p99 {self.commit_us_p99:.1f} us"),
        ]
        return "\n".join(f"{name:<16} {value}" for name, value in rows)


def make_report(stats: Mapping[str, int], times: StepTimes, *, block_size: int, bytes_per_block: int) -> KVReport:
    """The report of the core's counters (`Scheduler.stats()`) and the step loop's times."""
    return KVReport(
        block_size=block_size,
        num_blocks=stats["num_blocks"],
        peak_blocks=stats["peak_blocks"],
        used_blocks=stats["used_blocks"],
        bytes_per_block=bytes_per_block,
        wasted_rows_percent=_percent(stats["wasted_rows_sum"], stats["taken_rows_sum"]),
        prefix_hit_percent=_percent(stats["prefix_hits"], stats["prefix_queries"]),
        preemptions=stats["preemptions"],
        steps=stats["steps"],
        failed_steps=stats["failed_steps"],
        plan_us_p50=times.plan_us(50),
        plan_us_p99=times.plan_us(99),
        commit_us_p50=times.commit_us(50),
        commit_us_p99=times.commit_us(99),
    )


def _percent(part: int, whole: int) -> float:
    return 100.0 * part / whole if whole else 0.0
