"""Promise: a reader on the event loop gets everything once and in order, however late it comes, and one end."""

from __future__ import annotations

import asyncio

import pytest

from blocktable.errors import EngineDeadError
from blocktable.server.engine_client import Piece
from blocktable.server.piece_stream import PieceStream


def test_who_comes_late_finds_one_piece() -> None:
    async def main() -> None:
        stream = PieceStream()
        stream.put(Piece("a", [1]))
        assert await stream.get() == Piece("a", [1])
        for place in range(1000):
            stream.put(Piece("x", [place], num_cached_tokens=8))
        stream.put(Piece("z", [7], "length"))
        assert await stream.get() == Piece("x" * 1000 + "z", [*range(1000), 7], "length")
        assert stream.is_over

    asyncio.run(main())


def test_who_waits_is_woken_by_a_piece_and_by_an_error() -> None:
    async def main() -> None:
        stream = PieceStream()
        waiting = asyncio.create_task(stream.get())
        await asyncio.sleep(0)
        stream.put(Piece("a", [1]))
        stream.put(Piece("b", [2]))
        assert await waiting == Piece("ab", [1, 2])
        waiting = asyncio.create_task(stream.get())
        await asyncio.sleep(0)
        stream.fail(EngineDeadError("why"))
        with pytest.raises(EngineDeadError):
            await waiting

    asyncio.run(main())


def test_nothing_comes_behind_the_end() -> None:
    async def main() -> None:
        stream = PieceStream()
        stream.put(Piece("a", [1], "stop"))
        stream.put(Piece("b", [2]))
        stream.fail(EngineDeadError("late"))
        assert await stream.get() == Piece("a", [1], "stop")
        failed = PieceStream()
        failed.put(Piece("a", [1]))
        failed.fail(EngineDeadError("why"))
        failed.put(Piece("b", [2], "stop"))
        for _ in range(2):
            with pytest.raises(EngineDeadError, match="why"):
                await failed.get()

    asyncio.run(main())


def test_a_reader_that_is_cancelled_leaves_the_piece_for_the_next() -> None:
    async def main() -> None:
        stream = PieceStream()
        first = asyncio.create_task(stream.get())
        await asyncio.sleep(0)
        stream.put(Piece("a", [1]))
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)
        assert await asyncio.wait_for(stream.get(), 1) == Piece("a", [1])

    asyncio.run(main())
