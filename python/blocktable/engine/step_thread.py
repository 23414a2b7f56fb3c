"""The one thread that runs an engine's steps for readers elsewhere. It sleeps while there is nothing to do.

Before: `async_llm.py` submits and aborts, from any thread and any event loop. After: the step loop, which carries such orders
out in the order of their coming; outputs lie in mailboxes. Always: every request that was taken in ends in exactly one way, and
its reader is told: by a finished output, by its refusal, or, if the engine died, by `EngineDeadError`. Once the thread is over,
no request is taken in and no block is held.

A process that ends without a shutdown stops the thread first. After a fork the child has no such thread, and says so.
"""

from __future__ import annotations

import atexit
import logging
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from itertools import count
from typing import Any, TypeVar

from ..errors import EngineDeadError, InvalidInputError, ShutDownError
from ..sampling.params import RequestOutputKind
from .intake import Job
from .mailbox import Mailbox, Outbox
from .step_loop import StepLoop

logger = logging.getLogger("blocktable.engine")

NOTHING_RAN_S = 0.01
"""Seconds to sleep after a step that ran nothing although somebody waits (for what time alone brings, such as a deadline)."""

EXIT_PATIENCE_S = 30.0
"""Seconds that the end of the process waits for a step under way."""

NUM_REMEMBERED = 1024
"""Requests that have ended and can still be explained: as many as the core remembers."""

T = TypeVar("T")


@dataclass(slots=True, eq=False)
class Ticket:
    """One request from the moment somebody asked for it. `number` is the core's, once it has accepted it."""

    mailbox: Mailbox
    job: Job
    kind: RequestOutputKind
    arrived_ns: int = field(default_factory=time.perf_counter_ns)
    number: int | None = None


class StepThread:
    """Runs `loop` from `start` to `stop`; then calls `on_over`, on its own thread, to give the engine's memory back."""

    def __init__(self, loop: StepLoop, on_over: Callable[[], None]) -> None:
        self.outbox = Outbox(self._lose)
        self._loop = loop
        self._on_over = on_over
        self._tickets: dict[str, Ticket] = {}  # by request id: those that have not ended
        self._numbers: dict[str, int] = {}  # of those that ended, the oldest first
        self._calls: set[Future[Any]] = set()
        self._names = count()
        self._is_stopping = False
        self._why_over: Callable[[], Exception] | None = None
        self._cause: BaseException | None = None
        self._moved_ns = time.perf_counter_ns()
        self._is_asleep = False
        self._process = os.getpid()
        # A daemon, or the end of the process would wait for it before anybody could tell it to stop: see `_stop_all`.
        self._thread = threading.Thread(target=self._run, name="blocktable-steps", daemon=True)

    def start(self) -> None:
        """Begin. Once only."""
        _running.add(self)
        self._thread.start()

    @property
    def error(self) -> EngineDeadError | None:
        """What the engine died of; None while it lives and after a shutdown."""
        over = self._over()
        return over if isinstance(over, EngineDeadError) else None

    @property
    def is_running(self) -> bool:
        """Whether it takes requests in."""
        return self._over() is None and not self._is_stopping

    @property
    def native_thread(self) -> threading.Thread:
        """The thread itself."""
        return self._thread

    def still_s(self) -> float:
        """Seconds since something was last done, while there is something to do; 0.0 when there is nothing."""
        return 0.0 if self._is_asleep else (time.perf_counter_ns() - self._moved_ns) / 1e9

    def name(self, request_id: str | None) -> str:
        """The id of a new request: the caller's, or one that nobody has. Raises `InvalidInputError`."""
        if request_id is None:
            return next(name for name in map(str, self._names) if name not in self._tickets)
        if not isinstance(request_id, str) or not request_id:
            raise InvalidInputError("request_id", request_id, "must be a text that is not empty")
        return request_id

    def submit(self, ticket: Ticket) -> None:
        """Have a request queued. What becomes of it, its refusal too, comes to its mailbox.

        Raises `InvalidInputError` if a request of its id has not ended, `EngineDeadError`, `ShutDownError`."""
        self.check()
        mailbox = ticket.mailbox
        if self._tickets.setdefault(mailbox.request_id, ticket) is not ticket:
            raise InvalidInputError("request_id", mailbox.request_id, "is had by a request that has not ended")
        self._loop.post(lambda: self._queue(ticket))
        self._tell_if_over(ticket)

    def abort(self, ticket: Ticket) -> None:
        """Have a request ended. Never waits; may be called from a finalizer."""
        self._loop.post(lambda: self._abort(ticket))

    def find(self, request_id: str) -> Ticket | None:
        """The request of this id that has not ended."""
        return self._tickets.get(request_id)

    @property
    def live_tickets(self) -> list[Ticket]:
        """Of the requests that have not ended."""
        return list(self._tickets.values())

    def number_of(self, request_id: str) -> int | None:
        """The core's number of a request that lives, or that was among the last `NUM_REMEMBERED` to end."""
        ticket = self._tickets.get(request_id)
        return self._numbers.get(request_id) if ticket is None else ticket.number

    def block_namings(self, block: int) -> list[dict[str, Any]]:
        """See `AsyncLLM.block_namings`."""
        names = {
            ticket.number + child: name
            for name, ticket in list(self._tickets.items())
            if ticket.number is not None
            for child in range(ticket.job.sampling.n)
        }
        found = self._loop.scheduler.block_namings(block)
        return [{"request_id": names[of], "group": group, "index": index} for of, group, index in found if of in names]

    def call(self, work: Callable[[], T]) -> Future[T]:
        """Have `work` done between two crossings of the border. Raises `EngineDeadError`, `ShutDownError`, which may also come
        instead of a result."""
        self.check()
        future: Future[T] = Future()
        self._calls.add(future)
        self._loop.post(lambda: self._answer(future, work))
        over = self._over()
        if over is not None and future.cancel():  # the thread may have looked through `_calls` for the last time before
            raise over
        return future

    def check(self) -> None:
        """Raises `EngineDeadError` or `ShutDownError` if no request can be taken in any more."""
        over = self._over()
        if over is not None:
            raise over
        if self._is_stopping:
            raise ShutDownError

    def stop(self) -> None:
        """Have everything ended, and the thread with it. Never waits; may be called from a finalizer."""
        self._is_stopping = True
        self._loop.post(lambda: None)

    def join(self, timeout_s: float | None = None) -> bool:
        """Wait for the end of the thread; false if it did not come in time. Nothing to wait for on the thread itself."""
        if threading.current_thread() is self._thread or os.getpid() != self._process:
            return False
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _over(self) -> Exception | None:
        if os.getpid() != self._process:
            return EngineDeadError("it was made before a fork, in the parent process: make a new one")
        return None if self._why_over is None else self._why_over()

    # What follows runs on the thread, but for `_tell_if_over`.

    def _run(self) -> None:
        try:
            while not self._is_stopping:
                self._turn()
            self._finish()
        except BaseException as error:  # noqa: BLE001 - whatever it was, those who wait are told
            self._die(error)
        finally:
            _running.discard(self)

    def _turn(self) -> None:
        """One step, or one sleep."""
        if self._loop.is_settled:
            self._is_asleep = True
            self._loop.wait()
            self._moved_ns = time.perf_counter_ns()
            self._is_asleep = False
        elif not self._loop.step(lands=False) and not self._loop.is_settled:
            self._loop.wait(NOTHING_RAN_S)
        self.outbox.deliver(self._forget)
        self._moved_ns = time.perf_counter_ns()

    def _queue(self, ticket: Ticket) -> None:
        try:
            ticket.number = self._loop.add(
                ticket.job,
                ticket.mailbox,
                is_streamed=ticket.kind is not RequestOutputKind.FINAL_ONLY,
                arrived_ns=ticket.arrived_ns,
                request_id=ticket.mailbox.request_id,
            )
        except Exception as error:  # noqa: BLE001 - one request's refusal, which its reader gets
            self._end_with_error(ticket, error)

    def _abort(self, ticket: Ticket) -> None:
        if ticket.number is not None:
            self._loop.abort(ticket.number)

    def _answer(self, future: Future[T], work: Callable[[], T]) -> None:
        self._calls.discard(future)
        if not future.set_running_or_notify_cancel():
            return
        try:
            future.set_result(work())
        except Exception as error:  # noqa: BLE001 - it goes to whoever asked
            future.set_exception(error)

    def _lose(self, mailbox: Mailbox) -> None:
        ticket = self._tickets.get(mailbox.request_id)
        if ticket is not None and ticket.mailbox is mailbox:
            self.abort(ticket)

    def _forget(self, mailbox: Mailbox) -> None:
        ticket = self._tickets.pop(mailbox.request_id, None)
        if ticket is None or ticket.number is None:
            return
        self._numbers.pop(mailbox.request_id, None)
        self._numbers[mailbox.request_id] = ticket.number
        if len(self._numbers) > NUM_REMEMBERED:
            del self._numbers[next(iter(self._numbers))]

    def _end_with_error(self, ticket: Ticket, error: Exception) -> None:
        self._forget(ticket.mailbox)
        if ticket.mailbox.fail(error):
            self.outbox.ring([ticket.mailbox])

    def _finish(self) -> None:
        """Shut down: who was queued is aborted, who was not is refused."""
        self._why_over = ShutDownError
        try:
            self._on_over()
            self.outbox.deliver(self._forget)
        finally:
            self._tell_all()

    def _die(self, error: BaseException) -> None:
        """The engine is dead: nobody sees what its last step brought, everybody is told."""
        logger.critical("the engine died: %r", error, exc_info=error)
        self._cause = error
        self._why_over = self._death
        self.outbox.drop()
        self._tell_all()
        try:
            self._on_over()
        except Exception as second:
            logger.critical("and its memory was not given back: %r", second, exc_info=second)

    def _death(self) -> EngineDeadError:
        dead = EngineDeadError(repr(self._cause))
        dead.__cause__ = self._cause
        return dead

    def _tell_all(self) -> None:
        for ticket in list(self._tickets.values()):
            self._tell_if_over(ticket)
        for future in list(self._calls):
            self._answer(future, self.check)

    def _tell_if_over(self, ticket: Ticket) -> None:
        """Also called behind a submit: the thread may have told all the others between its check and its order."""
        over = self._over()
        if over is not None:
            self._end_with_error(ticket, over)


_running: set[StepThread] = set()
"""Keeps none alive that would not live anyway: each leaves with its thread."""


@atexit.register
def _stop_all() -> None:
    running = list(_running)
    for thread in running:
        thread.stop()
    for thread in running:
        thread.join(EXIT_PATIENCE_S)
