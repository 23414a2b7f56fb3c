"""The engine's process: builds an engine and does what a server on the other end of a socket asks. `python -m` runs it.

Before: `process_client.py` starts it with one end of a socket pair, and sends `wire.py`'s orders. After: reports to there;
the steps run on `StepThread`. Always: the process outlives its server by no more than a moment, whatever the server died of
(the system ends it at once on Linux, the end of the socket everywhere); it hears the socket while it builds and while it
steps; signals for the server's group are the server's to answer.
"""

from __future__ import annotations

import ctypes
import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, NoReturn

from ..errors import EngineDeadError, FrameError, InvalidInputError, ShutDownError
from ..sampling.params import RequestOutputKind, SamplingParams
from ..sampling.structured import read_structured
from .engine_client import EngineInfo
from .frames import FrameReader
from .garbage import settle_memory
from .logs import write_logs
from .packed_map import BlockMap
from .snapshot import engine_snapshot, stall_report
from .turns import Turns
from .wire import Abort, Answer, Ask, Beat, Dead, ErrorRecord, Launch, Order, Ready, Refused, Stop, Submit

if TYPE_CHECKING:
    from ..engine.build import Engine
    from ..engine.intake import Intake
    from ..engine.step_thread import StepThread, Ticket
    from .engine_sender import Sender

logger = logging.getLogger("blocktable.engine")

PR_SET_PDEATHSIG = 1
KILL = 9

RECEIVE_BYTES = 2**16

STOP_PATIENCE_S = 10.0
"""Seconds that the end waits for the step under way."""

SWITCH_S = 0.001
"""How long a thread may keep the interpreter from the step thread: reading a long prompt is no reason to be late."""


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """`FD PARENT`: the descriptor of the socket, and the process that holds its other end. Never returns: what a library left
    running does not keep the process."""
    descriptor, parent = (int(text) for text in (sys.argv[1:] if arguments is None else arguments))
    end_with(parent)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    sys.setswitchinterval(SWITCH_S)
    with socket.socket(fileno=descriptor) as connection:
        code = _serve(connection)
    os._exit(code)


def end_with(parent: int) -> None:
    """Have the system kill this process when `parent` ends, where it can; end now if that has ended already."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, KILL)
    if os.getppid() != parent:
        os._exit(1)


def _serve(connection: socket.socket) -> int:
    """Read orders until the end; returns the exit code."""
    reader: FrameReader[Order] = FrameReader(Order)
    process: EngineProcess | None = None
    while data := _received(connection):
        try:
            orders = reader.feed(data)
        except FrameError as error:
            logger.critical("the server sent what is no order: %s", error)
            return 1
        for order in orders:
            if isinstance(order, Launch):
                process = EngineProcess(connection, order)
            elif isinstance(order, Stop):
                return 0 if process is None else process.stop()
            elif process is not None:
                process.carry_out(order)
    return 0


def _received(connection: socket.socket) -> bytes:
    """What came; nothing at the end, however that came."""
    try:
        return connection.recv(RECEIVE_BYTES)
    except ConnectionError:
        return b""


class EngineProcess:
    """One engine behind one socket. Orders are carried out on the thread that reads them, but for requests with a new grammar,
    which may take a while to compile: tenant by tenant they have a turn on a thread beside it, and are queued from there."""

    def __init__(self, connection: socket.socket, launch: Launch) -> None:
        from .engine_sender import Sender

        self._logs = write_logs(launch.log_level, is_json=launch.log_is_json)
        self._launch = launch
        self._thread: StepThread | None = None
        self._engine: Engine | None = None
        self._intake: Intake | None = None
        self._tickets: dict[int, Ticket] = {}
        self._compiler = Turns("blocktable-grammars")
        self._compiling: set[int] = set()  # numbers of requests that are there and that nobody has left
        # Held where a request comes out of there, and where one is left: it is found in one place or the other.
        self._moving = threading.Lock()
        self._sender: Sender = Sender(
            connection, beat_s=launch.beat_s, beat=self._beat, on_end=self._forget, on_lost=self._abort
        )
        # Not here, or nobody would hear the socket while a large model is loaded.
        threading.Thread(target=self._build, name="blocktable-build", daemon=True).start()

    def carry_out(self, order: Submit | Abort | Ask) -> None:
        """One order. Raises nothing: what goes wrong is answered."""
        if isinstance(order, Submit):
            submit = partial(self._try_submit, order, time.perf_counter_ns())
            if "structured_outputs" in order.request.sampling:
                self._compiling.add(order.number)
                if not self._is_compiled(order):
                    self._compiler.put(order.request.tenant, submit)
                    return
            submit()
        elif isinstance(order, Abort):
            self._abort(order.number)
        else:
            try:
                self._answer(order)
            except Exception as error:  # noqa: BLE001 - it goes to whoever asked
                self._sender.post(Answer(order.number, None, ErrorRecord.of(error)))

    def stop(self) -> int:
        """End every request and the engine, as far as that goes in time; returns the exit code."""
        if self._thread is not None:
            self._thread.stop()
            self._thread.join(STOP_PATIENCE_S)
        self._sender.close()
        self._logs.end()
        return 0

    def _build(self) -> None:
        try:
            module, _, name = self._launch.builder.partition(":")
            build = getattr(import_module(module), name)
            engine: Engine = build(self._launch.model, self._launch.tokenizer, self._launch.options)
            if engine.grammars is not None:
                engine.grammars.prepare()
            from ..engine.step_thread import StepThread

            self._engine, self._intake = engine, engine.intake
            thread = StepThread(engine.loop, self._over)
            thread.start()
            self._thread = thread
        except BaseException as error:
            logger.debug("the engine was not built", exc_info=error)
            self._end(error)
        settle_memory()
        self._sender.post(Ready(engine_info(engine)))

    def _over(self) -> None:
        """The step thread has ended, on that thread. If it died, so does the process."""
        try:
            if self._engine is not None:
                self._engine.close()
        finally:
            died = None if self._thread is None else self._thread.error
            if died is not None:
                self._end(died)

    def _end(self, error: BaseException) -> NoReturn:
        self._sender.close(Dead(ErrorRecord.of(error)))
        self._logs.end()
        os._exit(1)

    def _running(self) -> StepThread:
        if self._thread is None:
            raise EngineDeadError("it is still being built")
        return self._thread

    def _beat(self) -> Beat:
        if self._thread is None or self._engine is None:
            return Beat(0, 0, 0, 0.0)
        scheduler = self._engine.loop.scheduler
        return Beat(scheduler.num_running, scheduler.num_waiting, scheduler.stats()["steps"], self._thread.still_s())

    def _is_compiled(self, order: Submit) -> bool:
        """Whether nothing is left to compile for it: its shape was asked for before, or is none, which is refused."""
        grammars = None if self._engine is None else self._engine.grammars
        try:
            shape = read_structured(order.request.sampling["structured_outputs"])
        except InvalidInputError:
            return True
        return shape is None or grammars is None or grammars.kept(shape) is not None

    def _abort(self, number: int) -> None:
        with self._moving:
            ticket = self._tickets.get(number)
            if ticket is not None:
                self._running().abort(ticket)
            elif number in self._compiling:
                # It ends here: whoever still listens need not wait until its turn has come.
                self._compiling.discard(number)
                self._sender.post(Refused(number, ErrorRecord.of(ShutDownError())))

    def _try_submit(self, order: Submit, arrived_ns: int) -> None:
        try:
            self._submit(order, arrived_ns)
        except Exception as error:  # noqa: BLE001 - one request's refusal, which its reader gets
            self._compiling.discard(order.number)
            self._sender.post(Refused(order.number, ErrorRecord.of(error)))

    def _submit(self, order: Submit, arrived_ns: int) -> None:
        from ..engine.intake import Wishes
        from ..engine.step_thread import Ticket
        from .engine_sender import WireMailbox

        thread, request = self._running(), order.request
        if "structured_outputs" in request.sampling and order.number not in self._compiling:
            return  # left while others were compiled
        if self._intake is None:
            raise EngineDeadError("it is still being built")
        kind = RequestOutputKind.DELTA if request.is_streamed else RequestOutputKind.FINAL_ONLY
        params = SamplingParams(**{**request.sampling, "output_kind": kind})
        wishes = Wishes(
            tenant=request.tenant,
            priority=request.priority,
            queue_deadline_s=request.queue_deadline_s,
            deadline_s=request.deadline_s,
        )
        prompt = {"prompt_token_ids": request.prompt_token_ids, "cache_salt": request.cache_salt}
        job = self._intake.job(prompt, params, wishes)
        mailbox = WireMailbox(thread.outbox, thread.name(request.request_id), kind, order.number, self._sender)
        ticket = Ticket(mailbox=mailbox, job=job, kind=kind, arrived_ns=arrived_ns)
        with self._moving:
            if job.grammar is not None and order.number not in self._compiling:
                return
            self._compiling.discard(order.number)
            self._tickets[order.number] = ticket
            try:
                thread.submit(ticket)
            except BaseException:
                self._forget(order.number)
                raise

    def _forget(self, number: int) -> None:
        self._tickets.pop(number, None)

    def _answer(self, order: Ask) -> None:
        if order.what == "reset_prefix_cache":
            thread, number = self._running(), order.number
            loop = self._built().loop
            thread.call(loop.reset_prefix_cache).add_done_callback(lambda done: self._post_result(number, done))
            return
        self._sender.post(Answer(order.number, self._told(order)))

    def _told(self, order: Ask) -> object:
        engine, thread = self._built(), self._running()
        scheduler = engine.loop.scheduler
        if order.what == "snapshot":
            return engine_snapshot(engine.loop, lost_log_lines=self._logs.lost)
        if order.what == "read_tokenizer":
            return None if engine.tokenizer is None else engine.tokenizer.parts()
        if order.what == "stall":
            live = [(ticket.mailbox.request_id, ticket.number) for ticket in thread.live_tickets]
            return stall_report(scheduler, live, thread.native_thread)
        if order.what == "explain":
            number = thread.number_of(order.about or "")
            if number is None:
                raise InvalidInputError("request_id", order.about, "is not known, not yet or not any more")
            return scheduler.explain(number)
        if order.what == "block_map":
            uses, tenants, names = scheduler.block_map()
            return BlockMap(uses.tobytes(), tenants.tobytes(), names)
        if order.what == "block_namings":
            return thread.block_namings(int(order.about or 0))
        raise InvalidInputError("what", order.what, "is no question")

    def _built(self) -> Engine:
        if self._engine is None:
            raise EngineDeadError("it is still being built")
        return self._engine

    def _post_result(self, number: int, done: Future[int]) -> None:
        error = done.exception()
        if error is not None:
            self._sender.post(Answer(number, None, ErrorRecord.of(error)))
        else:
            self._sender.post(Answer(number, done.result()))


def engine_info(engine: Engine) -> EngineInfo:
    """What does not change while this engine lives."""
    config, loaded = engine.config, engine.loaded
    return EngineInfo(
        model=config.model,
        dtype=config.dtype,
        max_model_len=engine.max_model_len,
        vocab_size=loaded.vocab_size,
        eos_token_ids=sorted(loaded.eos_token_ids),
        block_size=engine.sizing.block_size,
        num_blocks=engine.sizing.num_blocks,
        bytes_per_block=engine.sizing.bytes_per_block,
        max_num_seqs=config.max_num_seqs,
        max_waiting=config.max_waiting,
        max_logprobs=config.max_logprobs,
        policy=config.policy,
        device=config.device,
    )


if __name__ == "__main__":
    main()
