"""Where a step's forward pass runs: when its result is asked for, or at once on a thread of its own.

Before: the step loop launches a pass. After: it asks for the logits. Always: one pass at a time, in the order of their launch.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Protocol

import torch

Work = Callable[[], torch.Tensor]


class Run(Protocol):
    """A pass that was launched."""

    def wait(self) -> None:
        """Sleep until it has run. What this raises is not the model's: somebody interrupts the caller."""

    def result(self) -> torch.Tensor:
        """Its logits, or what it raised. Waits for them."""


class ModelRuns(Protocol):
    """Launches passes."""

    def launch(self, work: Work) -> Run:
        """Have `work` done."""

    def settle(self) -> None:
        """Wait until nothing runs any more."""

    def close(self) -> None:
        """Nothing is launched any more."""


class InlineRun:
    """Runs when its result is asked for, where it is asked for."""

    def __init__(self, work: Work) -> None:
        self.result = work

    def wait(self) -> None:
        """It runs where its result is asked for."""


class InlineRuns:
    """For a loop that does nothing else meanwhile."""

    def launch(self, work: Work) -> InlineRun:
        return InlineRun(work)

    def settle(self) -> None:
        """Nothing ever runs by itself."""

    def close(self) -> None:
        """Nothing is held."""


class ThreadRun:
    """Runs by itself."""

    def __init__(self, work: Work) -> None:
        self._work = work
        self._waits = threading.Lock()
        self._waits.acquire()
        self._done = threading.Event()
        self._logits: torch.Tensor | None = None
        self._error: BaseException | None = None

    def run(self) -> None:
        """On the model's thread."""
        self._waits.release()
        try:
            self._logits = self._work()
        except BaseException as error:  # noqa: BLE001 - it goes to whoever asks for the result
            self._error = error
        self._done.set()

    def wait_for_begin(self) -> None:
        """Sleep until the model's thread has taken it up. By its launcher, once."""
        self._waits.acquire()

    def wait(self) -> None:
        self._done.wait()

    def result(self) -> torch.Tensor:
        self.wait()
        if self._error is not None:
            raise self._error
        if self._logits is None:
            raise RuntimeError("this run had no result")
        return self._logits


class ThreadRuns:
    """One thread, which sleeps while nothing is launched. A daemon: the process may end without it."""

    def __init__(self) -> None:
        self._line: queue.SimpleQueue[ThreadRun | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="blocktable-model", daemon=True)
        self._thread.start()

    def launch(self, work: Work) -> ThreadRun:
        run = ThreadRun(work)
        self._line.put(run)
        # The launcher has milliseconds of other work. Going on with it, it would often keep the very core that the system means
        # the model's thread to wake on.
        run.wait_for_begin()
        return run

    def settle(self) -> None:
        if not self._thread.is_alive():  # closed before: an end that failed is tried again
            return
        # Behind whatever was launched, also if an interrupt made its launcher forget it.
        last = self.launch(lambda: torch.empty(0))
        last.result()

    def close(self) -> None:
        self._line.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (run := self._line.get()) is not None:
            run.run()
