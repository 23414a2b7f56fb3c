"""All answers to one request, which begin together, come as one stream, and end together.

Before: `generation.py` asked the engine for each prompt. After: `completions.py` and `chat.py` write what
comes. Always: who leaves the stream, in whatever way, ends every answer in it; one that is refused or fails ends the others.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing

from .engine_client import Piece
from .errors import ApiError, unavailable

Pieces = AsyncGenerator[Piece, None]


async def merged(streams: Mapping[int, Pieces]) -> AsyncGenerator[tuple[int, Piece], None]:
    """(key of the stream, piece), as they come, each stream to its end. One whose pieces are not taken waits, and merges what
    comes to it meanwhile.

    Raises what a stream raises."""
    came: asyncio.Queue[tuple[int, Piece] | Exception | None] = asyncio.Queue(maxsize=1)
    pumps = [asyncio.ensure_future(_pump(key, stream, came)) for key, stream in streams.items()]
    try:
        num_left = len(streams)
        while num_left:
            one = await came.get()
            if isinstance(one, Exception):
                raise one
            if one is None:
                num_left -= 1
            else:
                yield one
    finally:
        for pump in pumps:
            pump.cancel()
        await asyncio.gather(*pumps, return_exceptions=True)


async def _pump(key: int, stream: Pieces, into: asyncio.Queue[tuple[int, Piece] | Exception | None]) -> None:
    try:
        async with aclosing(stream):
            async for piece in stream:
                await into.put((key, piece))
        await into.put(None)
    except Exception as error:  # noqa: BLE001 - whatever it is, whoever reads the stream gets it
        await into.put(error)


def check_end(piece: Piece) -> None:
    """Raises `ApiError` for an end that is no answer."""
    match piece.finish_reason:
        case "error":
            raise ApiError(500, "a step of the engine failed", kind="server_error", code="step_failed")
        case "refused":
            message = "it waited longer than its queue_deadline_s"
            raise ApiError(429, message, kind="rate_limit_error", param="queue_deadline_s", code="queue_deadline")
        case "abort" if piece.stop_reason is None:
            raise unavailable("the request was ended by the server, which is shutting down", "aborted")
