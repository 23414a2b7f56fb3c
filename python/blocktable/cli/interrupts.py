"""What Ctrl-C and a termination do while a command runs. The only place that installs signal handlers.

Before: `command.py`, around every subcommand. After: `Interrupted` is raised in the main thread, and whoever holds something
frees it on the way out. Always: the handlers of before are back at the end.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

PATIENCE = 3
"""Signals after which the process ends at once: cleaning up takes milliseconds, so the second is only impatience."""


class Interrupted(KeyboardInterrupt):
    """The process was asked to end."""

    def __init__(self, signal_number: int) -> None:
        super().__init__(f"signal {signal_number}")
        self.exit_code = 128 + signal_number


@contextmanager
def interruptible() -> Iterator[None]:
    """SIGINT and SIGTERM raise `Interrupted`, once; the block's own clean-up is not cut short by a second one."""
    seen = 0

    def handle(signal_number: int, frame: FrameType | None) -> None:
        nonlocal seen
        seen += 1
        if seen == 1:
            raise Interrupted(signal_number)
        if seen >= PATIENCE:
            os._exit(128 + signal_number)

    before = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
