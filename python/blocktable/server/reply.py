"""Answers on the wire: one record as JSON, an error, a stream of events.

Before: `endpoint.py` has what a route returned. After: uvicorn has messages of ASGI. Always: a reader that takes nothing for
`write_timeout_s` loses its stream, and holds nobody up until then.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping

import msgspec
from starlette.types import Send

from .errors import ApiError

JSON_TYPE = b"application/json"

EVENT_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # nginx would hold events back
]


async def send_record(send: Send, record: msgspec.Struct | dict[str, object]) -> None:
    """200 and the record."""
    await _send(send, 200, msgspec.json.encode(record), {})


async def send_error(send: Send, error: ApiError) -> None:
    """The error's status, headers and body."""
    await _send(send, error.status, msgspec.json.encode(error.reply), error.headers)


async def send_events(send: Send, events: AsyncGenerator[bytes, None], write_timeout_s: float) -> None:
    """200 and the events as they come. The head waits for the first one: what fails before it still has its own status.

    Raises `TimeoutError` for a reader that takes nothing; whatever `events` raises before the first one.
    """
    event = await anext(events)
    await send({"type": "http.response.start", "status": 200, "headers": EVENT_HEADERS})
    async with asyncio.timeout(write_timeout_s) as patience:
        clock = asyncio.get_running_loop().time
        await send({"type": "http.response.body", "body": event, "more_body": True})
        patience.reschedule(None)
        async for event in events:
            patience.reschedule(clock() + write_timeout_s)
            await send({"type": "http.response.body", "body": event, "more_body": True})
            patience.reschedule(None)
    await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _send(send: Send, status: int, body: bytes, extra: Mapping[str, str]) -> None:
    headers = [(b"content-type", JSON_TYPE), (b"content-length", str(len(body)).encode())]
    headers += [(name.encode(), value.encode()) for name, value in extra.items()]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
