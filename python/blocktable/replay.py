"""Recordings of a scheduler, made again: what `blocktable replay` does, from Python.

Before: `Scheduler.start_recording(path)` wrote a file, or a crash report was left. After: a new scheduler made every call
again, and each plan and each outcome was the same, or the first difference is named. A recording holds prompts, salts and
outputs: keep it as you keep those.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from . import _core
from .errors import BlocktableError


@dataclass(frozen=True, slots=True)
class ReplayReport:
    """What a replay did."""

    calls: int
    """Calls that were made again."""
    plans: int
    """Plans among them, each compared array by array."""
    tokens: int
    """Tokens that they scheduled."""
    is_cut: bool
    """The file ends within a record, as after a crash: all before it was replayed."""
    ends_in_panic: bool
    """The last call never returned when it was recorded, and did not return now."""
    difference: str | None
    """The first difference, where the replay ended; None: all was the same."""


class ReplayDifferenceError(BlocktableError):
    """A replay did not do what was recorded. `report` says where."""

    def __init__(self, report: ReplayReport) -> None:
        super().__init__(str(report.difference))
        self.report = report


def replay(recording: str | os.PathLike[str] | bytes) -> ReplayReport:
    """Make the calls of a recording again, which is a file or its bytes.

    Raises `InvalidInputError` for what is no recording, is of another version, or lost its beginning in a ring: that one
    cannot be replayed, only read (`describe`).
    """
    content = recording if isinstance(recording, bytes) else Path(recording).read_bytes()
    return ReplayReport(**_core.replay(content))


def replayed(recording: str | os.PathLike[str] | bytes) -> ReplayReport:
    """The same; raises `ReplayDifferenceError` at a difference."""
    report = replay(recording)
    if report.difference is not None:
        raise ReplayDifferenceError(report)
    return report


def describe(recording: str | os.PathLike[str] | bytes) -> list[str]:
    """The calls of a recording, one line each, tokens counted and not shown; also of one that lost its beginning."""
    content = recording if isinstance(recording, bytes) else Path(recording).read_bytes()
    return _core.read_recording(content)
