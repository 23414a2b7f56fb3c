"""Promise: what a reader passes on at once comes to its client in the same order, once, as what waits for it."""

import asyncio
import random
from collections.abc import AsyncGenerator, Callable
from typing import Any

import pytest

from blocktable.server import endpoint
from blocktable.server.chunk_writer import WriteNow, chunk_writer, write_nothing
from blocktable.server.engine_client import EngineRequest, Piece
from blocktable.server.piece_stream import PieceStream

from .conftest import MakeServer
from .fake_engine import FakeEngine
from .live import events

WORDS = ["one", " two", "", " drei\n", ' "vier"', " 五", " fünf\u2028"]


async def words(request: EngineRequest) -> AsyncGenerator[Piece, None]:
    for place, word in enumerate(WORDS):
        await asyncio.sleep(0)
        yield Piece(word, [place], "stop" if word is WORDS[-1] else None, None, 0)


class Taker:
    """Passes on what it is willing to."""

    def __init__(self, is_willing: Callable[[], bool]) -> None:
        self.said: list[str] = []
        self.num_passed = 0
        self._is_willing = is_willing

    def at_once(self, piece: Piece) -> bool:
        if not self._is_willing():
            return False
        assert piece.finish_reason is None
        self.said.append(piece.text)
        self.num_passed += 1
        return True

    async def read(self, stream: PieceStream, pause: Callable[[], int]) -> None:
        """To the end, with pauses between a piece and the next."""
        while True:
            piece = await stream.get()
            for _ in range(pause()):
                await asyncio.sleep(0)
            self.said.append(piece.text)
            if piece.finish_reason is not None:
                return


async def passes_in_order(seed: int) -> int:
    """Returns how many pieces were passed on at once."""
    chance = random.Random(seed)
    taker = Taker(lambda: chance.random() < 0.7)
    stream = PieceStream(1, taker.at_once)
    reading = asyncio.ensure_future(taker.read(stream, lambda: chance.randrange(3)))
    for place in range(50):
        for _ in range(chance.randrange(3)):
            await asyncio.sleep(0)
        stream.put(Piece(f"{place} ", [place]))
    stream.put(Piece("end", [50], "stop"))
    await reading
    assert "".join(taker.said) == "".join(f"{place} " for place in range(50)) + "end"
    return taker.num_passed


def all_pass_in_order() -> int:
    return sum(asyncio.run(passes_in_order(seed)) for seed in range(50))


def test_pieces_come_in_order_whichever_way_they_go() -> None:
    assert all_pass_in_order() > 50


def test_a_piece_that_overtakes_what_waits_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted: a piece is offered although its reader is busy with those before it."""
    right = PieceStream.put

    def hasty(stream: PieceStream, piece: Piece) -> None:
        if piece.finish_reason is not None or not stream._passes(piece):
            right(stream, piece)

    monkeypatch.setattr(PieceStream, "put", hasty)
    with pytest.raises(AssertionError):
        all_pass_in_order()


def test_a_fault_of_one_who_passes_on_is_logged_once_and_costs_no_piece(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        def faulty(piece: Piece) -> bool:
            raise ValueError("planted")

        stream = PieceStream(1, faulty)
        for text in "ab":
            reading = asyncio.ensure_future(stream.get())
            await asyncio.sleep(0)
            stream.put(Piece(text, [1]))
            assert await reading == Piece(text, [1])

    asyncio.run(main())
    [record] = caplog.records
    assert "planted" in record.getMessage()
    assert record.exc_info is not None


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_a_stream_says_the_same_whichever_way_its_events_go(
    path: str, serve: MakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Byte for byte, but for its id and its time; and that way was gone."""
    monkeypatch.setattr("blocktable.server.reader.Reader.chat", _one_token)
    written: list[bytes] = []

    def counted(send: Any) -> WriteNow:
        write = chunk_writer(send)

        def note(body: bytes) -> bool:
            if is_written := write(body):
                written.append(body)
            return is_written

        return note

    server = serve(FakeEngine(words))
    said = []
    for make in (counted, lambda send: write_nothing):
        monkeypatch.setattr(endpoint, "chunk_writer", make)
        ask = {"stream": True, "stream_options": {"include_usage": True}}
        ask |= {"prompt": [1]} if path == "/v1/completions" else {"messages": [{"role": "user", "content": "?"}]}
        body = server.client().post(path, json=ask).text
        [own] = {one["id"] for one in events(body) if one != "[DONE]"}
        [created] = {one["created"] for one in events(body) if one != "[DONE]"}
        said.append(body.replace(own, "ID").replace(f'"created":{created}', '"created":0'))
    assert said[0] == said[1]
    assert len(written) == len(WORDS) - 3  # but for the first, the last, and the one that says nothing
    assert all(one.startswith(b"data: {") and one.endswith(b"}\n\n") for one in written)


async def _one_token(*arguments: Any, **options: Any) -> list[int]:
    return [1]


def test_nothing_is_written_past_a_server_that_is_not_known() -> None:
    async def send(message: Any) -> None:
        pass

    assert not chunk_writer(send)(b"data: {}\n\n")


def test_several_prompts_come_each_in_order(serve: MakeServer) -> None:
    """They are merged, and none of their pieces overtakes another."""

    async def count(request: EngineRequest) -> AsyncGenerator[Piece, None]:
        for place in range(100):
            await asyncio.sleep(0)
            yield Piece(f"{place} ", [1], "stop" if place == 99 else None, None, 0)

    server = serve(FakeEngine(count))
    body = server.client().post("/v1/completions", json={"prompt": [[1], [2], [3]], "stream": True}).text
    said: dict[int, list[int]] = {0: [], 1: [], 2: []}
    for one in events(body):
        if one != "[DONE]":
            for choice in one["choices"]:
                said[choice["index"]] += map(int, choice["text"].split())
    assert all(places == list(range(100)) for places in said.values())
