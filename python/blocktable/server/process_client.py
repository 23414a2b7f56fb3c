"""An `EngineClient` whose engine runs in a process of its own: one life of that process, from its start to its end.

Before: `supervisor.py` starts one. After: `engine_process.py`, over a socket pair that no path names. Always: nothing here
waits but on the event loop; when the process ends, in whatever way, every open request and question ends with
`EngineDeadError` that says how; a request that nobody reads is aborted; what the engine sends is kept for a slow reader as
one piece a request.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import socket
import subprocess
import sys
import time
from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass, field
from typing import Any, cast

import msgspec

from ..errors import EngineDeadError, FrameError, QueueFullError, ShutDownError
from ..openmp import waiting
from ..text.tokenizer_parts import TokenizerParts
from .engine_client import AtOnce, EngineInfo, EngineRequest, EngineState, Piece, Progress
from .frames import FrameReader, frame
from .packed_map import BlockMap
from .piece_stream import PieceStream
from .wire import Abort, Answer, Ask, Beat, Dead, Launch, Order, Pieces, Ready, Refused, Report, Stop, Submit

logger = logging.getLogger("blocktable.server")

REAP_S = 2.0
"""Seconds that a process gets to end by itself once its socket is closed."""

STOP_S = 15.0
"""Seconds that a process gets to end once it was asked to."""

ABORT_S = 2.0
"""Seconds that the last pieces of aborted requests get to come."""

ANSWER_S = 30.0
"""Seconds to wait for an answer. Answers to what only looks come at once, unless the process is stopped."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLaunch:
    """What a process is started with."""

    model: str
    tokenizer: str | None = None
    options: Mapping[str, object] = field(default_factory=dict)
    """Of `EngineConfig`."""
    builder: str = "blocktable.engine.build:build_engine"
    beat_s: float = 0.25
    log_level: str = "info"
    log_is_json: bool = False


class ProcessClient(asyncio.Protocol):
    """See `EngineClient`. Made on an event loop, by `start`."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self.ready: asyncio.Future[EngineInfo] = asyncio.get_running_loop().create_future()
        """Its result comes when the engine takes requests; it raises what building it raised."""
        self.ended: asyncio.Future[EngineDeadError] = asyncio.get_running_loop().create_future()
        """Its result comes when the process has ended and everybody was told."""
        self._process = process
        self._transport: asyncio.Transport | None = None
        self._reader: FrameReader[Report] = FrameReader(Report)
        self._numbers = itertools.count(1)
        self._streams: dict[int, PieceStream] = {}
        self._questions: dict[int, asyncio.Future[Any]] = {}
        self._state = EngineState.STARTING
        self._info: EngineInfo | None = None
        self._last_words: Exception | None = None
        self._beat = Beat(0, 0, 0, 0.0)
        self._heard_at = self._moved_at = time.monotonic()
        self._reaping: asyncio.Task[None] | None = None
        self._emptied = asyncio.Event()
        self._is_closed = False

    @classmethod
    async def start(cls, launch: EngineLaunch) -> ProcessClient:
        """Start a process; it is ready when `ready` says so."""
        ours, theirs = socket.socketpair()
        try:
            with theirs:
                line = [sys.executable, "-P", "-m", "blocktable.server.engine_process", str(theirs.fileno()), str(os.getpid())]
                # A session of its own: Ctrl-C in a terminal is for the server alone.
                process = subprocess.Popen(
                    line,
                    stdin=subprocess.DEVNULL,
                    env={**os.environ, **waiting(os.environ)},
                    pass_fds=(theirs.fileno(),),
                    start_new_session=True,
                )
        except BaseException:
            ours.close()
            raise
        ours.settimeout(0.0)
        client = cls(process)
        await asyncio.get_running_loop().create_unix_connection(lambda: client, sock=ours)
        client._send(
            Launch(
                model=launch.model,
                tokenizer=launch.tokenizer,
                options=dict(launch.options),
                builder=launch.builder,
                beat_s=launch.beat_s,
                log_level=launch.log_level,
                log_is_json=launch.log_is_json,
            )
        )
        return client

    @property
    def process_id(self) -> int:
        """Of the engine's process."""
        return self._process.pid

    @property
    def info(self) -> EngineInfo:
        if self._info is None:
            raise self._why_not() or EngineDeadError("it is still being built")
        return self._info

    @property
    def state(self) -> EngineState:
        return self._state

    @property
    def num_open(self) -> int:
        """Requests whose end has not come."""
        return len(self._streams)

    @property
    def progress(self) -> Progress:
        """`still_s` also grows while nothing is heard, while a request is on its way, and while steps bring nothing about."""
        beat, now = self._beat, time.monotonic()
        has_work = bool(self._streams) or beat.num_running + beat.num_waiting > 0
        still_s = now - self._moved_at if has_work and self._state is not EngineState.DEAD else 0.0
        return Progress(
            num_running=beat.num_running,
            num_waiting=beat.num_waiting,
            num_steps=beat.num_steps,
            still_s=still_s,
            heard_s=now - self._heard_at,
        )

    async def read_tokenizer(self) -> TokenizerParts | None:
        return msgspec.convert(await self._ask("read_tokenizer"), TokenizerParts | None)

    async def generate(self, request: EngineRequest, at_once: AtOnce | None = None) -> AsyncGenerator[Piece, None]:
        error = self._why_not()
        if error is not None:
            raise error
        self._check_room()
        num_answers = request.sampling.get("n", 1)
        number, stream = next(self._numbers), PieceStream(num_answers, at_once)
        if not self._streams:
            self._moved_at = time.monotonic()
        self._streams[number] = stream
        try:
            self._send(Submit(number, request))
            while num_answers > 0:
                piece = await stream.get()
                num_answers -= piece.finish_reason is not None
                yield piece
        finally:
            if not stream.is_over:
                self._close_stream(number)
                self._send(Abort(number))

    async def snapshot(self) -> dict[str, Any]:
        told: dict[str, Any] = await self._ask("snapshot")
        return told

    async def stall(self) -> dict[str, Any]:
        told: dict[str, Any] = await self._ask("stall")
        return told

    async def explain(self, request_id: str) -> dict[str, Any]:
        told: dict[str, Any] = await self._ask("explain", request_id)
        return told

    async def block_map(self) -> BlockMap:
        return msgspec.convert(await self._ask("block_map"), BlockMap)

    async def block_namings(self, block: int) -> list[dict[str, Any]]:
        namings: list[dict[str, Any]] = await self._ask("block_namings", str(block))
        return namings

    async def reset_prefix_cache(self) -> int:
        forgotten: int = await self._ask("reset_prefix_cache")
        return forgotten

    async def drain(self, timeout_s: float) -> bool:
        if self._state in (EngineState.STARTING, EngineState.READY):
            self._state = EngineState.DRAINING
        self._tell_if_empty()
        if await self._is_empty_in(timeout_s):
            return True
        for number in self._streams:
            self._send(Abort(number))
        await self._is_empty_in(ABORT_S)
        return False

    async def close(self) -> None:
        self._is_closed = True
        if self._transport is not None and not self._transport.is_closing():
            self._send(Stop())
            try:
                await asyncio.wait_for(asyncio.shield(self.ended), STOP_S)
            except TimeoutError:
                self._process.kill()
        await self.ended

    def kill(self) -> None:
        """End the process now. What follows is told by `ended`."""
        self._process.kill()

    # What follows is called by the event loop.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        try:
            reports = self._reader.feed(data)
        except FrameError as error:
            self._last_words = error
            self._process.kill()
            return
        self._heard_at = time.monotonic()
        for report in reports:
            self._take(report)

    def connection_lost(self, exc: Exception | None) -> None:
        self._state = EngineState.DEAD
        self._reaping = asyncio.get_running_loop().create_task(self._reap())

    def _take(self, report: Report) -> None:
        if isinstance(report, Pieces):
            self._moved_at = self._heard_at
            streams = self._streams
            for number, piece in zip(report.numbers, report.pieces):
                stream = streams.get(number)
                if stream is not None:
                    stream.put(piece)
                    if stream.is_over:
                        self._close_stream(number)
        elif isinstance(report, Beat):
            self._take_beat(report)
        elif isinstance(report, Refused):
            stream = self._streams.get(report.number)
            if stream is not None:
                stream.fail(report.error.error())
                self._close_stream(report.number)
        elif isinstance(report, Answer):
            self._take_answer(report)
        elif isinstance(report, Ready):
            self._info = report.info
            if self._state is EngineState.STARTING:
                self._state = EngineState.READY
            if not self.ready.done():
                self.ready.set_result(report.info)
        elif isinstance(report, Dead):
            self._last_words = report.error.error()

    def _take_beat(self, beat: Beat) -> None:
        is_idle = not self._streams and beat.num_running + beat.num_waiting == 0
        if is_idle or beat.num_steps != self._beat.num_steps:
            # As far back as the engine says: a step may hang that began long before this beat.
            self._moved_at = max(self._moved_at, self._heard_at - beat.still_s)
        self._beat = beat

    def _take_answer(self, answer: Answer) -> None:
        question = self._questions.pop(answer.number, None)
        if question is None or question.done():
            return
        if answer.error is None:
            question.set_result(answer.value)
        else:
            question.set_exception(answer.error.error())

    async def _is_empty_in(self, timeout_s: float) -> bool:
        try:
            await asyncio.wait_for(self._emptied.wait(), timeout_s)
        except TimeoutError:
            return False
        return True

    async def _reap(self) -> None:
        """Learn how the process ended, and tell everybody."""
        code = await asyncio.to_thread(self._wait)
        how = f"its process was ended by signal {-code}" if code < 0 else f"its process ended with exit code {code}"
        words = self._last_words
        dead = words if isinstance(words, EngineDeadError) else EngineDeadError(how if words is None else f"{words} ({how})")
        for number, stream in list(self._streams.items()):
            stream.fail(dead)
            self._close_stream(number)
        for question in self._questions.values():
            if not question.done():
                question.set_exception(dead)
        self._questions.clear()
        if not self.ready.done():
            self.ready.set_exception(words if words is not None else dead)
            self.ready.exception()  # nobody has to ask
        self._last_words = dead
        self.ended.set_result(dead)

    def _wait(self) -> int:
        try:
            return self._process.wait(REAP_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            return self._process.wait()

    async def _ask(self, what: str, about: str | None = None) -> Any:
        if self._state is EngineState.DEAD or self._transport is None:
            raise self._why_not() or EngineDeadError("it has ended")
        number = next(self._numbers)
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._questions[number] = answer
        try:
            self._send(Ask(number, what, about))
            return await asyncio.wait_for(answer, ANSWER_S)
        except TimeoutError:
            raise EngineDeadError(f"it has not answered for {ANSWER_S:g} s") from None
        finally:
            self._questions.pop(number, None)

    def _why_not(self) -> Exception | None:
        """Why no request can be taken in now; None if it can."""
        if self._is_closed or self._state is EngineState.DRAINING:
            return ShutDownError()
        if self._state is EngineState.DEAD:
            words = self._last_words
            return words if isinstance(words, EngineDeadError) else EngineDeadError(str(words or "its process has ended"))
        return None if self._state is EngineState.READY else EngineDeadError("it is still being built")

    def _check_room(self) -> None:
        """The engine refuses what does not fit its line, but not while its process is stopped: then orders would pile up."""
        info = self._info
        limit = 0 if info is None else info.max_num_seqs + info.max_waiting
        if len(self._streams) >= limit:
            raise QueueFullError(limit, "open requests", len(self._streams))

    def _close_stream(self, number: int) -> None:
        del self._streams[number]
        if not self._streams:
            self._tell_if_empty()

    def _tell_if_empty(self) -> None:
        if self._state is not EngineState.READY and not self._streams:
            self._emptied.set()

    def _send(self, order: Order) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(frame(order))
