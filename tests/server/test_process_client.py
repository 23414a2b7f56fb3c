"""Promise: the server's end of the socket does its part alone: whoever leaves is told of, a death is told to everybody, a
broken frame ends the process, what does not move shows. No process is started here; each check has a fault that it catches."""

from __future__ import annotations

import asyncio
import subprocess
import time
from collections.abc import Callable, Coroutine
from contextlib import aclosing
from typing import Any

import pytest

from blocktable.errors import EngineDeadError, QueueFullError
from blocktable.server.engine_client import EngineState, Piece
from blocktable.server.frames import FrameReader, frame
from blocktable.server.piece_stream import PieceStream
from blocktable.server.process_client import ProcessClient
from blocktable.server.request_watch import WatchedClient, WatchedRequest
from blocktable.server.wire import Abort, Beat, Order, Pieces, Ready, Submit

from .processes import read, request
from .test_frames import INFO


class Process:
    """A process that does nothing, and ends when it is killed."""

    pid = 1

    def __init__(self) -> None:
        self.is_killed = False

    def kill(self) -> None:
        self.is_killed = True

    def wait(self, timeout: float | None = None) -> int:
        if not self.is_killed and timeout is not None:
            raise subprocess.TimeoutExpired("", timeout)
        return -9


class Wire:
    """A client whose engine is this test."""

    def __init__(self) -> None:
        self.process: Any = Process()
        self.client = ProcessClient(self.process)
        self.orders: list[Any] = []
        self._reader: FrameReader[Any] = FrameReader(Order)
        transport: Any = self
        self.client.connection_made(transport)
        self.say(Ready(INFO))

    def write(self, data: bytes) -> None:
        self.orders += self._reader.feed(data)

    def is_closing(self) -> bool:
        return self.process.is_killed

    def say(self, report: Any) -> None:
        self.client.data_received(bytes(frame(report)))

    async def beats(self, count: int, **fields: Any) -> None:
        for _ in range(count):
            await asyncio.sleep(0.01)
            self.say(Beat(**{"num_running": 1, "num_waiting": 0, "num_steps": 5, "still_s": 0.0} | fields))


async def who_leaves_is_told_of(wire: Wire) -> None:
    async with aclosing(wire.client.generate(request([1], 5, "a"))) as pieces:
        waiting = asyncio.ensure_future(anext(pieces))
        await asyncio.sleep(0)
        [submit] = wire.orders
        assert isinstance(submit, Submit)
        wire.say(Pieces([submit.number], [Piece("x", [1])]))
        assert (await waiting).text == "x"
    assert wire.orders[1:] == [Abort(submit.number)]
    assert wire.client.num_open == 0
    wire.say(Pieces([submit.number], [Piece("late", [2], "abort")]))  # nobody is there


async def a_death_is_told_to_everybody(wire: Wire) -> None:
    running = [asyncio.create_task(read(wire.client, request([1], 5, str(place)))) for place in range(9)]
    question = asyncio.create_task(wire.client.snapshot())
    await asyncio.sleep(0)
    wire.process.is_killed = True
    wire.client.connection_lost(None)
    assert wire.client.state is EngineState.DEAD
    ends = await asyncio.wait_for(asyncio.gather(*running, question, return_exceptions=True), 5)
    assert all(isinstance(end, EngineDeadError) and "signal 9" in str(end) for end in ends)
    assert wire.client.num_open == 0
    with pytest.raises(EngineDeadError):
        await read(wire.client, request([1], 5, "after"))


async def beats_without_steps_are_no_progress(wire: Wire) -> None:
    waiting = asyncio.create_task(read(wire.client, request([1], 5, "a")))
    await wire.beats(1)
    asked_at = time.monotonic()
    await wire.beats(20)
    so_far = time.monotonic() - asked_at
    assert wire.client.progress.still_s >= so_far
    moved_at = time.monotonic()
    wire.say(Beat(1, 0, 6, 0.0))
    told = wire.client.progress.still_s
    assert told <= time.monotonic() - moved_at
    said_at = time.monotonic()
    await wire.beats(20, num_running=0, num_steps=6)
    so_far = time.monotonic() - said_at
    assert wire.client.progress.still_s >= so_far, "it is open here, although the engine knows of nothing"
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    await wire.beats(1, num_running=0, num_steps=6)
    assert wire.client.progress.still_s == 0


async def a_slow_reader_finds_everything(wire: Wire) -> None:
    async with aclosing(wire.client.generate(request([1], 5, "a"))) as pieces:
        first = asyncio.ensure_future(anext(pieces))
        await asyncio.sleep(0)
        number = wire.orders[0].number
        for place in range(100):
            wire.say(Pieces([number], [Piece(str(place % 10), [place], "length" if place == 99 else None)]))
        assert (await first).token_ids == list(range(100))


async def a_broken_frame_ends_the_process(wire: Wire) -> None:
    wire.client.data_received(b"\x03\x00\x00\x00abc")
    assert wire.process.is_killed


async def orders_do_not_pile_up(wire: Wire) -> None:
    limit = INFO.max_num_seqs + INFO.max_waiting
    running = [asyncio.create_task(read(wire.client, request([1], 5, str(place)))) for place in range(limit)]
    await asyncio.sleep(0)
    with pytest.raises(QueueFullError, match="open requests"):
        await asyncio.wait_for(read(wire.client, request([1], 5, "more")), 1)
    for task in running:
        task.cancel()
    await asyncio.gather(*running, return_exceptions=True)


async def a_fault_in_the_books_stops_no_answer(wire: Wire) -> None:
    """Fault 134, for the metrics of the server."""
    watched = WatchedClient(wire.client)
    answer = asyncio.create_task(read(watched, request([1], 5, "a")))
    await asyncio.sleep(0)
    wire.say(Pieces([wire.orders[0].number], [Piece("x", [1], "length")]))
    assert [piece.text for piece in await answer] == ["x"]


Check = Callable[[Wire], Coroutine[Any, Any, None]]
CHECKS: list[Check] = [
    who_leaves_is_told_of,
    a_death_is_told_to_everybody,
    beats_without_steps_are_no_progress,
    a_slow_reader_finds_everything,
    a_broken_frame_ends_the_process,
    orders_do_not_pile_up,
    a_fault_in_the_books_stops_no_answer,
]


def run(check: Check) -> None:
    async def main() -> None:
        await check(Wire())

    asyncio.run(asyncio.wait_for(main(), 10))


@pytest.mark.parametrize("check", CHECKS)
def test_what_the_servers_end_does(check: Check, monkeypatch: pytest.MonkeyPatch) -> None:
    if check is a_fault_in_the_books_stops_no_answer:
        monkeypatch.setattr(WatchedRequest, "saw", _raise)
        monkeypatch.setattr(WatchedRequest, "ended", _raise)
    run(check)


def _raise(*_: Any) -> None:
    raise RuntimeError("planted: the books fail")


def _drops_aborts(client: ProcessClient, order: Any, send: Any = ProcessClient._send) -> None:
    if not isinstance(order, Abort):
        send(client, order)


async def _reaps_in_silence(client: ProcessClient) -> None:
    client.ended.set_result(EngineDeadError("nobody was told"))


def _every_beat_moves(client: ProcessClient, beat: Beat) -> None:
    client._beat = beat
    client._moved_at = client._heard_at


def _keeps_the_last(stream: PieceStream, piece: Piece) -> None:
    stream._latest = piece
    stream.is_over = piece.finish_reason is not None
    stream._ring()


def _unguarded(_: Any, note: Any, what: Any) -> None:
    note(what)


PLANTED: list[tuple[Check, type, str, Any]] = [
    (who_leaves_is_told_of, ProcessClient, "_send", _drops_aborts),
    (a_death_is_told_to_everybody, ProcessClient, "_reap", _reaps_in_silence),
    (beats_without_steps_are_no_progress, ProcessClient, "_take_beat", _every_beat_moves),
    (a_slow_reader_finds_everything, PieceStream, "put", _keeps_the_last),
    (a_broken_frame_ends_the_process, Process, "kill", lambda process: None),
    (orders_do_not_pile_up, ProcessClient, "_check_room", lambda client: None),
    (a_fault_in_the_books_stops_no_answer, WatchedClient, "_guarded", _unguarded),
]


@pytest.mark.parametrize(("check", "owner", "name", "fault"), PLANTED)
def test_a_planted_fault_is_caught(check: Check, owner: type, name: str, fault: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(owner, name, fault)
    if check is a_fault_in_the_books_stops_no_answer:
        monkeypatch.setattr(WatchedRequest, "saw", _raise)
    with pytest.raises((AssertionError, TimeoutError, RuntimeError)):
        run(check)
