"""Promise: who has not said what he wants holds little memory, and not for long; a client of HTTP/1.0 can read its answer, a
stream too; who asks for another protocol besides is answered as if he had not."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import nullcontext

import pytest
from uvicorn.protocols.http.auto import AutoHTTPProtocol

from blocktable.server.engine_client import EngineRequest, Piece
from blocktable.server.limits import Limits
from blocktable.server.refusals import Refusal, Refusals

from . import live
from .conftest import MakeServer
from .fake_engine import FakeEngine
from .live import PATIENCE_S, Live, events, wait_until

POST = b"POST /v1/completions HTTP/1.%d\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
ASK = b'{"prompt": [1], "stream": true}'
LENGTH = b"Content-Length: %d\r\n\r\n" % len(ASK)


@pytest.fixture
def uvicorns_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted: nothing of ours reads HTTP."""
    monkeypatch.setattr(live.http_protocol, "counting_protocol", lambda *given: AutoHTTPProtocol)


def connect(server: Live) -> socket.socket:
    return socket.create_connection(("127.0.0.1", int(server.url.rsplit(":", 1)[1])), PATIENCE_S)


def to_the_end(connection: socket.socket) -> bytes:
    data = b""
    while piece := connection.recv(2**16):
        data += piece
    return data


def asked_in_1_0(server: Live, more: bytes = b"") -> tuple[bytes, bytes]:
    """Head and body of the answer, which ends with the connection."""
    with connect(server) as connection:
        connection.sendall(POST % 0 + more + LENGTH + ASK)
        head, _, body = to_the_end(connection).partition(b"\r\n\r\n")
    return head.lower(), body


@pytest.mark.parametrize("more", [b"", b"Connection: keep-alive\r\n"], ids=["plain", "keep-alive"])
def test_a_stream_to_http_1_0_has_no_chunks(more: bytes, serve: MakeServer) -> None:
    server = serve(FakeEngine())
    head, body = asked_in_1_0(server, more)
    assert head.startswith(b"http/1.1 200")
    assert b"transfer-encoding" not in head
    assert b"connection: close" in head
    whole = server.client().post("/v1/completions", content=ASK, headers={"content-type": "application/json"}).text
    assert [one if one == "[DONE]" else one["choices"] for one in events(body.decode())] == [
        one if one == "[DONE]" else one["choices"] for one in events(whole)
    ]


@pytest.mark.usefixtures("uvicorns_own")
def test_chunks_to_http_1_0_are_caught(serve: MakeServer) -> None:
    with pytest.raises(AssertionError):
        test_a_stream_to_http_1_0_has_no_chunks(b"", serve)


def test_an_answer_in_one_piece_and_an_error_to_http_1_0_have_their_lengths(serve: MakeServer) -> None:
    server = serve(FakeEngine())
    for path, status in (("/v1/models", b"200"), ("/v1/nothing", b"404")):
        with connect(server) as connection:
            connection.sendall(f"GET {path} HTTP/1.0\r\nHost: 127.0.0.1\r\n\r\n".encode())
            head, _, body = to_the_end(connection).partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 " + status)
        assert b"content-length: %d\r\n" % len(body) in head.lower() + b"\r\n"


def endless(start: bytes, piece: bytes) -> Callable[[], Iterator[bytes]]:
    """More than any machine keeps at hand for it."""

    def pieces() -> Iterator[bytes]:
        yield start
        for _ in range(1000):
            yield piece

    return pieces


CHUNKED = POST % 1 + b"Transfer-Encoding: chunked\r\n\r\n"
HEADS = {
    "one header": endless(b"GET / HTTP/1.1\r\nX: ", b"x" * 2**14),
    "many headers": endless(b"GET / HTTP/1.1\r\n", b"X: y\r\n" * 2**11),
    "a path": endless(b"GET /", b"x" * 2**14),
    "nothing but line ends": endless(b"", b"\r\n" * 2**13),
    "trailers": endless(CHUNKED + b"%x\r\n%b\r\n0\r\n" % (len(ASK), ASK), b"X: y\r\n" * 2**11),
    "an extension of a chunk": endless(CHUNKED + b"1;", b"x" * 2**14),
}


def is_cut_off(server: Live, pieces: Callable[[], Iterator[bytes]]) -> bytes:
    """What came before the end of the connection, which came before all was taken."""
    with connect(server) as connection:
        try:
            for piece in pieces():
                connection.sendall(piece)
        except (BrokenPipeError, ConnectionResetError):
            pass
        else:
            raise AssertionError("all of it was taken")
        try:
            return to_the_end(connection)
        except ConnectionResetError:  # it had sent what was not read
            return b""


@pytest.mark.parametrize("name", HEADS)
def test_a_head_without_end_is_cut_off(name: str, serve: MakeServer) -> None:
    refusals, engine = Refusals(), FakeEngine()
    server = serve(engine, refusals=refusals)
    is_cut_off(server, HEADS[name])
    wait_until(lambda: server.num_connections == 0, "the connection stays")
    assert engine.begun == []
    assert server.client().get("/version").status_code == 200
    assert refusals.counts[Refusal.NOT_HTTP] == (name not in ("trailers", "an extension of a chunk"))


@pytest.mark.usefixtures("uvicorns_own")
@pytest.mark.parametrize("name", ["one header", "many headers", "trailers"])
def test_a_head_that_is_taken_without_end_is_caught(name: str, serve: MakeServer) -> None:
    with pytest.raises(AssertionError, match="all of it was taken"):
        test_a_head_without_end_is_cut_off(name, serve)


def test_a_head_of_sixty_thousand_bytes_is_read(serve: MakeServer) -> None:
    answer = serve(FakeEngine()).client().get("/version", headers={"x-long": "x" * 60_000})
    assert answer.status_code == 200


def test_a_large_body_in_small_chunks_is_read(serve: MakeServer) -> None:
    content = (ASK[place : place + 1] for place in range(len(ASK)))
    padding = (b" " * 10 for _ in range(50_000))

    def pieces() -> Iterator[bytes]:
        yield from content
        yield from padding

    answer = (
        serve(FakeEngine()).client().post("/v1/completions", content=pieces(), headers={"content-type": "application/json"})
    )
    assert answer.status_code == 200


SLOW = {
    "nothing but a part of a head": [b"GET /version HTTP/1.1\r\nHost: "],
    "a line end": [b"\r\n"],
    "the head of a second request": [b"GET /version HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n", b"GET /ver"],
}


def is_let_go(server: Live, *sent: bytes) -> None:
    """Each part but the last is answered."""
    with connect(server) as connection:
        for place, part in enumerate(sent):
            assert place == 0 or connection.recv(2**16).startswith(b"HTTP/1.1 200")
            connection.sendall(part)
        wait_until(lambda: server.num_connections == 1, "it was not taken")
        wait_until(lambda: server.num_connections == 0, "the connection stays", 5.0)


@pytest.mark.parametrize("name", SLOW)
def test_a_head_that_does_not_come_is_not_waited_for(name: str, serve: MakeServer) -> None:
    server = serve(FakeEngine(), limits=Limits(body_timeout_s=0.3))
    server._server.config.timeout_keep_alive = 60
    is_let_go(server, *SLOW[name])


@pytest.mark.parametrize("is_planted", [False, True], ids=["as it is", "planted: it may stay"])
def test_a_connection_on_which_nothing_is_asked_rests_as_long_as_others(
    is_planted: bool, serve: MakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    if is_planted:
        monkeypatch.setattr(live.http_protocol, "counting_protocol", lambda *given: AutoHTTPProtocol)
    server = serve(FakeEngine())
    server._server.config.timeout_keep_alive = 1
    with pytest.raises(TimeoutError) if is_planted else nullcontext():
        is_let_go(server)


@pytest.mark.usefixtures("uvicorns_own")
def test_a_head_that_is_waited_for_is_caught(serve: MakeServer) -> None:
    with pytest.raises(TimeoutError, match="the connection stays"):
        test_a_head_that_does_not_come_is_not_waited_for("nothing but a part of a head", serve)


def test_who_is_answered_is_not_hurried(serve: MakeServer) -> None:
    """The time for a head is over before the answer begins."""

    async def late(request: EngineRequest) -> AsyncGenerator[Piece, None]:
        await asyncio.sleep(0.5)
        yield Piece("late", [1], "stop", None, 0)

    server = serve(FakeEngine(late), limits=Limits(body_timeout_s=0.1))
    with connect(server) as connection:
        connection.sendall(POST % 1)
        threading.Event().wait(0.02)  # a head in two pieces
        connection.sendall(b"Connection: close\r\n" + LENGTH + ASK)
        assert b"late" in to_the_end(connection)


OFFERS = {
    "HTTP/2, as Java does": b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAEAAEAAAAIAAAAB\r\n",
    "a socket of the web": b"Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\n",
}


def asked_with(server: Live, offer: bytes, cut: int) -> None:
    """Two requests on one connection, the second in two pieces, and a third behind it that leaves no word about it."""
    plain = b"Content-Length: 15\r\n\r\n" + b'{"prompt": [1]}'
    with connect(server) as connection:
        connection.sendall(POST % 1 + offer + plain)
        answer = b""
        while b"}" not in answer.partition(b"\r\n\r\n")[2]:
            piece = connection.recv(2**16)
            assert piece, answer
            answer += piece
        assert answer.startswith(b"HTTP/1.1 200"), answer
        assert b'"text":"abc"' in answer
        second = POST % 1 + offer + plain
        connection.sendall(second[:cut])
        threading.Event().wait(0.02)
        connection.sendall(second[cut:] + POST % 1 + b"Connection: close\r\n" + plain)
        assert to_the_end(connection).count(b'"text":"abc"') == 2


@pytest.mark.parametrize("cut", [1, 40, 150, -15, -3])
@pytest.mark.parametrize("name", OFFERS)
def test_who_offers_another_protocol_is_answered_as_if_he_had_not(name: str, cut: int, serve: MakeServer) -> None:
    asked_with(serve(FakeEngine()), OFFERS[name], cut)


@pytest.mark.usefixtures("uvicorns_own")
def test_a_body_that_is_left_out_beside_an_offer_is_caught(serve: MakeServer) -> None:
    with pytest.raises(AssertionError):
        asked_with(serve(FakeEngine()), OFFERS["HTTP/2, as Java does"], 40)


def test_thousands_of_offers_in_a_row_end_nothing(serve: MakeServer) -> None:
    get = b"GET /version HTTP/1.1\r\nHost: 127.0.0.1\r\n"
    offer = get + b"Connection: Upgrade\r\nUpgrade: x\r\n\r\n"
    with connect(serve(FakeEngine())) as connection:
        sending = threading.Thread(target=connection.sendall, args=(offer * 3000 + get + b"Connection: close\r\n\r\n",))
        sending.start()
        assert to_the_end(connection).count(b"HTTP/1.1 200") == 3001
        sending.join()


def test_a_tunnel_is_refused(serve: MakeServer) -> None:
    with connect(serve(FakeEngine())) as connection:
        connection.sendall(b"CONNECT localhost:80 HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert to_the_end(connection).startswith(b"HTTP/1.1 400")
