"""Every figure of an engine at one moment, as plain numbers: what metrics are made from.

Before: the core's counters and the step loop's clocks. After: `metrics.py`, perhaps in another process. Always: nothing here
waits for a step.
"""

from __future__ import annotations

import os
import sys
import threading
import time
import traceback
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import BlocktableError

if TYPE_CHECKING:
    from .._core import Scheduler
    from ..engine.step_loop import StepLoop

STARTED_S = time.time()
"""When this process began to serve, since 1970: another one after a restart."""

QUANTILES = (50.0, 99.0, 99.9)

MAX_TOLD = 100
"""Requests that `stall_report` tells of, at most."""


def engine_snapshot(loop: StepLoop, *, lost_log_lines: int = 0) -> dict[str, Any]:
    """See `EngineClient.snapshot`. `stats` is the core's `Scheduler.stats()`; times are nanoseconds or microseconds by name;
    `now_s` is of one clock as long as `started_s` stays."""
    times = loop.times
    return {
        "stats": loop.scheduler.stats(),
        "phases_ns": times.phases_ns(),
        "scheduler_cpu_ns": times.cpu_ns(),
        "plan_us": {str(quantile): times.plan_us(quantile) for quantile in QUANTILES},
        "commit_us": {str(quantile): times.commit_us(quantile) for quantile in QUANTILES},
        "scheduler_cpu_us": {str(quantile): times.cpu_us(quantile) for quantile in QUANTILES},
        "process_cpu_s": time.process_time(),
        "resident_bytes": resident_bytes(),
        "lost_log_lines": lost_log_lines,
        "started_s": STARTED_S,
        "now_s": time.monotonic(),
    }


def stall_report(scheduler: Scheduler, live: Iterable[tuple[str, int | None]], thread: threading.Thread) -> dict[str, Any]:
    """See `EngineClient.stall`. `live`: (request id, the core's number) of those that have not ended."""
    waiting: list[dict[str, Any]] = []
    for request_id, number in live:
        if len(waiting) == MAX_TOLD:
            break
        waiting.append({"request_id": request_id, **_place(scheduler, number)})
    frame = sys._current_frames().get(thread.ident or 0)
    stack = [] if frame is None else [line.rstrip() for line in traceback.format_stack(frame)]
    return {"waiting": waiting, "stack": stack}


def resident_bytes() -> int:
    """Memory of this process that lies in RAM; 0 where the system does not tell."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        return 0


def _place(scheduler: Scheduler, number: int | None) -> Mapping[str, Any]:
    if number is None:
        return {"place": "not queued yet", "waits_for": None}
    try:
        told = scheduler.explain(number)
    except BlocktableError:
        return {"place": "ended", "waits_for": None}
    return {"place": told["place"], "waits_for": told["waits_for"]}
