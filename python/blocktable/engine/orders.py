"""What others want done between two crossings of the border, in the order in which they said so.

Before: any thread posts. After: whoever runs the steps carries it out, before a plan or before a commit and nowhere else; so
what enters the core stands in one order, whoever it came from. Always: posting never waits.
"""

from __future__ import annotations

import queue
from collections.abc import Callable

Order = Callable[[], object]
"""It raises nothing of one request's: what it raises ends the engine."""


class Orders:
    """One line of them. Its end that carries out is used by one thread at a time."""

    def __init__(self) -> None:
        # Its `put` may be called from a finalizer that runs in the middle of another `put`.
        self._line: queue.SimpleQueue[Order] = queue.SimpleQueue()
        self.is_busy = False
        """An order is being carried out."""

    def post(self, order: Order) -> None:
        """From any thread, also from a finalizer."""
        self._line.put(order)

    def next(self, timeout_s: float | None) -> Order | None:
        """Sleep until there is one, at most `timeout_s`."""
        try:
            return self._line.get(timeout=timeout_s)
        except queue.Empty:
            return None

    def carry_out(self, order: Order) -> None:
        """This one, now."""
        self.is_busy = True
        try:
            order()
        finally:
            self.is_busy = False

    def carry_out_all(self) -> None:
        """Those that have been posted. Those that come meanwhile have to wait, so that this ends."""
        for _ in range(self._line.qsize()):
            self.carry_out(self._line.get_nowait())
