"""A thread that does the work of several tenants in turn: who brings much waits for his own, and for one of each other's.

Before: `engine_process.py` has requests whose grammars are to be compiled. After: they are submitted from here. Always: what
one tenant brings is done in its order; a tenant that comes anew waits for what is under way, and for one piece of work of each
other tenant that waits.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable

Work = Callable[[], object]
"""Raises nothing."""


class Turns:
    """The thread is started by the first work, and ends with its process."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._lines: dict[str | None, deque[Work]] = {}  # of each tenant who waits, or whose work is under way
        self._waiting: deque[str | None] = deque()  # whose turn comes next, first
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None

    def put(self, tenant: str | None, work: Work) -> None:
        """Have it done. From any thread; never waits for work."""
        with self._changed:
            line = self._lines.get(tenant)
            if line is None:
                line = self._lines[tenant] = deque()
                self._waiting.append(tenant)
            line.append(work)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                self._thread.start()
            self._changed.notify()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting)
                tenant = self._waiting.popleft()
                work = self._lines[tenant].popleft()
            work()
            with self._changed:
                if self._lines[tenant]:
                    self._waiting.append(tenant)
                else:
                    del self._lines[tenant]
