"""Promise: a client that leaves, in whatever state its request is, streamed or not, has it ended within one step of being
noticed: no more tokens are computed for it, no block stays, nobody else notices."""

import asyncio
import json
import threading
import time
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from uvicorn.protocols.http.auto import AutoHTTPProtocol

from blocktable import AsyncLLM
from blocktable.server import endpoint
from blocktable.server.engine_client import EngineRequest, Piece
from blocktable.server.in_process import InProcessEngine
from tests.engine.faults import faulty_model, loop_of
from tests.engine.ways import check_empty

from . import live
from .conftest import MakeServer
from .fake_engine import FakeEngine
from .live import Live, events, open_request, wait_until

STEP_S = 0.02
"""Of the slow model: what is not ended would go on for more than 100 of them."""

NOTICED = 1
"""Steps from the server's noticing that a client left to the end of its request, at most."""

HELD_S = 2.0
"""How long a step waits for a server that notices nothing."""

LONG = {"prompt": list(range(40, 140)), "max_tokens": 150, "ignore_eos": True}
SHORT = {"prompt": [5, 6, 7], "max_tokens": 200, "ignore_eos": True}

STATES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    # What runs beside it takes the only row.
    "waiting": ({"max_num_seqs": 1}, SHORT),
    # A hundred tokens, four a step.
    "prefill": ({"max_num_batched_tokens": 5}, LONG),
    "decode": ({}, SHORT),
}


class Pace:
    """Of the slow model. Held, a step lasts until `go_on`, at most `HELD_S`, and then no other one does."""

    def __init__(self) -> None:
        self._goes_on = threading.Event()
        self._goes_on.set()

    def hold(self) -> None:
        self._goes_on.clear()

    def go_on(self) -> None:
        self._goes_on.set()

    def pass_step(self) -> None:
        time.sleep(STEP_S)
        if not self._goes_on.wait(HELD_S):
            self._goes_on.set()


@contextmanager
def slow_model(engine: AsyncLLM) -> Iterator[Pace]:
    pace = Pace()

    def fault(plan: Any, forward: Callable[[], Any]) -> Any:
        pace.pass_step()
        return forward()

    with faulty_model(engine, fault):
        yield pace


def steps_of(engine: AsyncLLM) -> int:
    return int(engine.scheduler.stats()["steps"])


def live_requests(engine: AsyncLLM) -> int:
    return engine.scheduler.num_running + engine.scheduler.num_waiting


@contextmanager
def ends(engine: AsyncLLM, pace: Pace) -> Iterator[list[int]]:
    """Holds a step until the engine was asked to end a request; the list gets the number of steps when it did."""
    found: list[int] = []
    thread: Any = engine._thread
    loop = loop_of(engine)
    abort_ticket, abort = thread.abort, loop.abort

    def ask(ticket: Any) -> None:
        abort_ticket(ticket)
        pace.go_on()

    def end(number: int) -> bool:
        was_live: bool = abort(number)
        if was_live:
            found.append(steps_of(engine))
        return was_live

    thread.abort, loop.abort = ask, end
    pace.hold()
    try:
        yield found
    finally:
        thread.abort, loop.abort = abort_ticket, abort
        pace.go_on()


def leave(server: Live, engine: AsyncLLM, pace: Pace, state: str, *, is_streamed: bool, n: int = 1) -> int:
    """One runs, another comes and leaves in `state`; returns the steps from the server's noticing that to the end of its
    request. If it does not notice: from then to the request's own end."""
    beside = open_request(server, "/v1/completions", SHORT | {"stream": True})
    wait_until(lambda: engine.scheduler.num_running == 1, "the one beside it does not run")
    left = open_request(server, "/v1/completions", STATES[state][1] | {"stream": is_streamed, "n": n})
    wait_until(lambda: live_requests(engine) == 1 + n, "it did not come")
    if state == "decode":
        now = steps_of(engine)
        wait_until(lambda: steps_of(engine) >= now + 4, "no steps")
    else:
        wait_until(lambda: (engine.scheduler.num_waiting == n) is (state == "waiting"), "the state was not reached")
    with ends(engine, pace) as found:
        at = steps_of(engine)
        left.close()
        wait_until(lambda: live_requests(engine) == 1, "it was not ended")
        steps = max(found, default=steps_of(engine)) - at
    beside.close()
    wait_until(lambda: live_requests(engine) == 0, "the one beside it was not ended")
    wait_until(lambda: engine.scheduler.stats()["parked_blocks"] == 0, "the step in flight did not end")
    check_empty(engine)
    return steps


@pytest.mark.parametrize("is_streamed", [True, False])
@pytest.mark.parametrize("state", STATES)
def test_who_leaves_is_ended(state: str, is_streamed: bool, make_async: Callable[..., AsyncLLM], serve: MakeServer) -> None:
    engine = make_async(**STATES[state][0])
    server = serve(engine)
    with slow_model(engine) as pace:
        assert leave(server, engine, pace, state, is_streamed=is_streamed) <= NOTICED


@pytest.mark.parametrize("is_streamed", [True, False])
def test_who_leaves_has_all_its_answers_ended(is_streamed: bool, engine: AsyncLLM, serve: MakeServer) -> None:
    server = serve(engine)
    with slow_model(engine) as pace:
        assert leave(server, engine, pace, "decode", is_streamed=is_streamed, n=4) <= NOTICED


def wait_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The connection tells of nobody's leaving by itself, as under another server: a task waits for it."""
    monkeypatch.setattr(endpoint, "when_left", lambda receive, call: False)


@pytest.mark.parametrize("is_streamed", [True, False])
def test_who_leaves_is_ended_also_where_the_connection_does_not_tell(
    is_streamed: bool, engine: AsyncLLM, serve: MakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    wait_for_it(monkeypatch)
    server = serve(engine)
    with slow_model(engine) as pace:
        assert leave(server, engine, pace, "decode", is_streamed=is_streamed) <= NOTICED


async def deaf(receive: Any) -> None:
    """Never hears of a client that left."""
    await asyncio.Event().wait()


@pytest.mark.parametrize("waits", [True, False])
def test_a_server_that_does_not_listen_is_caught(
    waits: bool, engine: AsyncLLM, serve: MakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Planted: nobody waits for the client's leaving, or is told of it; an answer in one piece is computed to its end."""
    if waits:
        wait_for_it(monkeypatch)
    monkeypatch.setattr(endpoint, "_left", deaf)
    monkeypatch.setattr(live.http_protocol, "tell_left", lambda cycle: None)
    server = serve(engine)
    with slow_model(engine) as pace:
        assert leave(server, engine, pace, "decode", is_streamed=False) > NOTICED


def test_an_abort_that_is_dropped_is_caught(engine: AsyncLLM, serve: MakeServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted: the stream of the engine goes on by itself when its reader has gone."""
    right, going_on = InProcessEngine.generate, []

    async def detached(self: InProcessEngine, request: EngineRequest, at_once: object = None) -> AsyncGenerator[Piece, None]:
        queue: asyncio.Queue[Piece] = asyncio.Queue()

        async def pump() -> None:
            async for piece in right(self, request):
                queue.put_nowait(piece)

        going_on.append(asyncio.ensure_future(pump()))
        while True:
            piece = await queue.get()
            yield piece
            if piece.finish_reason is not None:
                return

    monkeypatch.setattr(InProcessEngine, "generate", detached)
    server = serve(engine)
    with slow_model(engine) as pace:
        assert leave(server, engine, pace, "decode", is_streamed=True) > NOTICED


def test_a_client_that_leaves_does_not_change_what_another_reads(engine: AsyncLLM, serve: MakeServer) -> None:
    server = serve(engine)
    ask = {"prompt": "Once upon a time", "max_tokens": 60, "temperature": 0, "ignore_eos": True}
    cold = server.client().post("/v1/completions", json=ask).json()["choices"][0]["text"]
    for place in range(12):
        leaving = open_request(server, "/v1/completions", LONG | {"stream": True})
        if place % 3:
            leaving.recv(200 * place)
        body = server.client().post("/v1/completions", json=ask | {"stream": True}).text
        leaving.close()
        assert "".join(one["choices"][0]["text"] for one in events(body) if one != "[DONE]") == cold
    wait_until(lambda: live_requests(engine) == 0, "some were not ended")
    check_empty(engine)


def storm(server: Live, engine: AsyncLLM, count: int) -> None:
    for place in range(count):
        ask = (LONG if place % 2 else SHORT) | {"stream": bool(place % 3), "n": 1 + place % 2}
        connection = open_request(server, "/v1/completions", ask)
        wanted = (place * 7) % 21
        data = b""
        while ask["stream"] and data.count(b"data: ") < wanted:
            piece = connection.recv(4096)
            assert piece, data
            data += piece
        connection.close()
    wait_until(lambda: live_requests(engine) == 0, "some were not ended")
    check_empty(engine)
    answer = server.client().post("/v1/completions", json={"prompt": "Hello", "max_tokens": 3, "ignore_eos": True})
    assert json.loads(answer.text)["usage"]["completion_tokens"] == 3


def test_a_hundred_streams_left_after_any_number_of_pieces_leave_nothing(engine: AsyncLLM, serve: MakeServer) -> None:
    storm(serve(engine), engine, 100)


@pytest.mark.slow
def test_two_thousand_streams_left_leave_nothing(engine: AsyncLLM, serve: MakeServer) -> None:
    import psutil

    server = serve(engine)
    storm(server, engine, 1000)
    before = psutil.Process().memory_info().rss
    storm(server, engine, 2000)
    assert psutil.Process().memory_info().rss - before < 20 * 2**20


def check_pipelined(serve: MakeServer) -> None:
    """Two more requests were sent before the first was answered."""
    is_over = threading.Event()

    async def going_on(request: EngineRequest) -> AsyncGenerator[Piece, None]:
        while not is_over.is_set():
            await asyncio.sleep(0.001)
            yield Piece("a", [1], None, None, 0)
        yield Piece("a", [1], "stop", None, 0)

    engine = FakeEngine(going_on)
    connection = open_request(serve(engine), "/v1/completions", {"prompt": [1], "stream": True})
    content = b'{"prompt": [1]}'
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\nContent-Length: {len(content)}"
    )
    connection.sendall((head.encode() + b"\r\n\r\n" + content) * 2)
    wait_until(lambda: engine.num_pieces > 100, "a stream that goes on")
    connection.close()
    try:
        wait_until(lambda: len(engine.ended) == 1, "its end", 5.0)
    finally:
        is_over.set()
    assert len(engine.begun) == 1


def test_who_leaves_while_more_requests_wait_behind_the_first_has_all_of_them_ended(serve: MakeServer) -> None:
    check_pipelined(serve)


def test_a_server_that_tells_the_newest_request_alone_is_caught(serve: MakeServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted: uvicorn's own way."""
    monkeypatch.setattr(live.http_protocol, "counting_protocol", lambda *given: AutoHTTPProtocol)
    with pytest.raises(TimeoutError):
        check_pipelined(serve)
