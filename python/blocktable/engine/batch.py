"""The requests of one call, queued as the queue has room, and their results in the order of the call.

Before: `llm.py` has read and checked prompts and parameters. After: the caller's list or stream. Always: either all
requests of the call are accepted or none runs; whichever way the call is left, none of its requests goes on.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from types import TracebackType

from ..errors import InvalidInputError, NeverFitsError, QueueFullError
from .inbox import OutputQueue
from .intake import Job
from .outputs import RequestOutput
from .step_loop import StepLoop


@dataclass(slots=True)
class Batch:
    """Some jobs on one step loop. Use as a context manager: leaving it ends what has not ended."""

    loop: StepLoop
    jobs: Sequence[Job]
    is_streamed: bool = False
    inbox: OutputQueue = field(init=False, default_factory=OutputQueue)
    _places: dict[str, int] = field(init=False, default_factory=dict)  # request id -> place in `jobs`
    _waiting: deque[int] = field(init=False, default_factory=deque)  # places that the queue had no room for
    _num_open: int = field(init=False, default=0)
    _arrived_ns: int = field(init=False, default_factory=time.perf_counter_ns)

    def __enter__(self) -> Batch:
        """Queue the jobs. Raises what the first refused one raises, with its place in the call; none of them runs then."""
        self._num_open = len(self.jobs)
        try:
            for place in range(len(self.jobs)):
                self._queue(place)
        except BaseException as error:
            self.close(error)
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close(error)

    def close(self, error: BaseException | None = None) -> None:
        """End what has not ended. After a `KeyboardInterrupt` everything of the engine ends: it may have fallen anywhere, even
        between a submit and its note."""
        if isinstance(error, KeyboardInterrupt):
            self.loop.abandon()
        self._waiting.clear()
        self._num_open = 0
        for request_id in self._places:
            self.loop.abort(int(request_id))
        self.inbox.clear()

    def drop(self) -> None:
        """As `close`, from a finalizer."""
        self._waiting.clear()
        self._num_open = 0
        self.loop.drop(map(int, self._places))

    def outputs(self) -> Iterator[tuple[int, RequestOutput]]:
        """(place in the call, output) as they come, running the engine's steps meanwhile, until all jobs have ended."""
        while self._num_open:
            while self.inbox:
                output = self.inbox.popleft()
                self._num_open -= output.finished
                yield self._places[output.request_id], output
            if self._num_open:
                self._feed()
                self.loop.step()

    def _feed(self) -> None:
        """Queue those that had to wait, in order, until the queue is full again."""
        while self._waiting:
            try:
                self._add(self._waiting[0])
            except QueueFullError:
                return
            self._waiting.popleft()

    def _queue(self, place: int) -> None:
        """The core checks a job before it looks for room, so a full queue means that the job is acceptable."""
        try:
            self._add(place)
        except QueueFullError:
            self._waiting.append(place)
        except (InvalidInputError, NeverFitsError) as error:
            if len(self.jobs) > 1:
                error.add_note(f"in prompts[{place}]")
            raise

    def _add(self, place: int) -> None:
        number = self.loop.add(self.jobs[place], self.inbox, is_streamed=self.is_streamed, arrived_ns=self._arrived_ns)
        self._places[str(number)] = place


class Stream:
    """The outputs of a batch as they come: an iterator of (place in the call, output). Closing it ends its requests."""

    def __init__(self, batch: Batch) -> None:
        """Queues the jobs; raises as `Batch.__enter__`."""
        self._batch = batch.__enter__()
        self._outputs = batch.outputs()

    def __iter__(self) -> Stream:
        return self

    def __next__(self) -> tuple[int, RequestOutput]:
        try:
            return next(self._outputs)
        except StopIteration:
            raise
        except BaseException as error:
            self._batch.close(error)
            raise

    def close(self, error: BaseException | None = None) -> None:
        """End what has not ended."""
        self._batch.close(error)

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close(error)

    def __del__(self) -> None:
        # A stream that is dropped half way must not leave its requests running. None: the queueing was refused.
        if getattr(self, "_batch", None) is not None:
            self._batch.drop()
