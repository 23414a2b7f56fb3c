"""Promise: a reader that takes nothing holds up nobody, costs bounded memory, and loses its stream in the end."""

import asyncio
import socket
import threading
from collections.abc import AsyncGenerator
from typing import Any

import pytest

from blocktable import AsyncLLM
from blocktable.server import endpoint, reply
from blocktable.server.chunk_writer import WriteNow
from blocktable.server.engine_client import EngineRequest, Piece
from blocktable.server.limits import Limits
from tests.engine.ways import check_empty

from .conftest import MakeServer
from .fake_engine import FakeEngine
from .live import Live, events, open_request, wait_until

KILOBYTES = Piece("x" * 10_000, [1], None, None, 0)


async def endless(request: EngineRequest) -> AsyncGenerator[Piece, None]:
    while True:
        await asyncio.sleep(0)
        yield KILOBYTES


def is_given_up(server: Live, engine: FakeEngine) -> None:
    with open_request(server, "/v1/completions", {"prompt": [1], "stream": True}):
        wait_until(lambda: len(engine.ended) == 1, "it was not given up")
    # uvicorn says that the answer was not whole, and closes the connection.
    wait_until(lambda: len(server.faults.records) == 1, "the connection was not closed")
    assert "without completing" in server.faults.records.pop().getMessage()
    # Two buffers of the system and one of the server: some megabytes, however long it goes on.
    assert engine.num_pieces < 2000


@pytest.fixture
def only_the_server_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """The system does not let go of a slow reader by itself."""
    monkeypatch.setattr(reply, "let_go_of_slow_readers", lambda listener, write_timeout_s: None)


@pytest.mark.usefixtures("only_the_server_counts")
def test_a_reader_that_takes_nothing_is_given_up(serve: MakeServer) -> None:
    engine = FakeEngine(endless)
    is_given_up(serve(engine, limits=Limits(write_timeout_s=0.3)), engine)


@pytest.mark.skipif(not hasattr(socket, "TCP_USER_TIMEOUT"), reason="the system has no TCP_USER_TIMEOUT")
@pytest.mark.parametrize("is_planted", [False, True])
def test_its_connection_goes_too(is_planted: bool, serve: MakeServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Although what was written to it still waits for it. Planted: the system was not told, and it stays."""
    if is_planted:
        monkeypatch.setattr(reply, "let_go_of_slow_readers", lambda listener, write_timeout_s: None)
    engine = FakeEngine(endless)
    server = serve(engine, limits=Limits(write_timeout_s=0.3))
    with open_request(server, "/v1/completions", {"prompt": [1], "stream": True}):
        wait_until(lambda: len(engine.ended) == 1, "it was not given up")
        if is_planted:
            with pytest.raises(TimeoutError):
                _only_a_second(lambda: server.num_connections == 0)
        else:
            wait_until(lambda: server.num_connections == 0, "the connection stays")
    wait_until(lambda: server.num_connections == 0, "the connection stays although the reader has gone")
    server.faults.records.clear()


@pytest.mark.usefixtures("only_the_server_counts")
def test_a_server_that_waits_for_ever_is_caught(serve: MakeServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted: a reader may take as long as it likes."""
    engine = FakeEngine(endless)
    monkeypatch.setattr(reply.asyncio, "timeout", lambda seconds: asyncio.timeouts.Timeout(None))
    monkeypatch.setattr(asyncio.timeouts.Timeout, "reschedule", lambda self, when: None)
    monkeypatch.setattr("tests.server.test_slow_readers.wait_until", lambda is_so, what: _only_a_second(is_so))
    server = serve(engine, limits=Limits(write_timeout_s=0.3))
    with pytest.raises(TimeoutError):
        is_given_up(server, engine)


def test_a_writer_that_does_not_heed_a_slow_reader_is_caught(serve: MakeServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted: what comes is written, however much lies there."""

    async def much(request: EngineRequest) -> AsyncGenerator[Piece, None]:
        for _ in range(3000):
            await asyncio.sleep(0)
            yield KILOBYTES
        await asyncio.sleep(3600)

    def heedless(send: Any) -> WriteNow:
        def write(body: bytes) -> bool:
            if is_sent := bool(send.__self__.chunked_encoding):
                send.__self__.transport.write(b"%x\r\n%b\r\n" % (len(body), body))
            return is_sent

        return write

    engine = FakeEngine(much)
    monkeypatch.setattr(endpoint, "chunk_writer", heedless)
    monkeypatch.setattr("tests.server.test_slow_readers.wait_until", lambda is_so, what: _only_a_second(is_so))
    server = serve(engine, limits=Limits(write_timeout_s=0.3))
    with pytest.raises(TimeoutError):
        is_given_up(server, engine)
    assert engine.num_pieces == 3000


def _only_a_second(is_so: object) -> None:
    for _ in range(100):
        if callable(is_so) and is_so():
            return
        threading.Event().wait(0.01)
    raise TimeoutError


def test_a_slow_reader_takes_bounded_pieces_and_every_word(serve: MakeServer) -> None:
    """What comes while it does not read is one piece; together they are the whole text."""

    async def say(request: EngineRequest) -> AsyncGenerator[Piece, None]:
        for place in range(300):
            await asyncio.sleep(0)
            yield Piece(f"{place} " * 500, [1], None, None, 0)
        yield Piece("", [], "stop", None, 0)

    server = serve(FakeEngine(say))
    with open_request(server, "/v1/completions", {"prompt": [1], "stream": True}) as connection:
        threading.Event().wait(0.3)
        data = b""
        while not data.endswith(b"0\r\n\r\n"):
            data += connection.recv(2**16)
    said = b"".join(data.split(b"\r\n\r\n", 1)[1].split(b"\r\n")[1::2]).decode()
    texts = [one["choices"][0]["text"] for one in events(said) if one != "[DONE]"]
    assert "".join(texts) == "".join(f"{place} " * 500 for place in range(300))


def test_readers_that_take_nothing_hold_up_nobody(engine: AsyncLLM, serve: MakeServer) -> None:
    server = serve(engine)
    ask = {"prompt": [5, 6, 7], "max_tokens": 100, "ignore_eos": True, "stream": True}
    still = [open_request(server, "/v1/completions", ask) for _ in range(8)]
    answer = server.client().post("/v1/completions", json=ask | {"stream": False}).json()
    assert answer["usage"]["completion_tokens"] == 100
    wait_until(lambda: engine.scheduler.num_running + engine.scheduler.num_waiting == 0, "some still run")
    for connection in still:
        connection.close()
    check_empty(engine)
