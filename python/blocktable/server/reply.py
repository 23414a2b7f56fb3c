"""Answers on the wire: one record as JSON, an error, a stream of events.

Before: `endpoint.py` has what a route returned. After: uvicorn has messages of ASGI. Always: a reader that takes nothing for
`write_timeout_s` loses its stream, and holds nobody up until then.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncGenerator, Callable, Mapping

import msgspec
from starlette.types import Send

from .errors import ApiError, api_error
from .sse import Last, error_event

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


async def send_events(
    send: Send, events: AsyncGenerator[bytes, None], write_timeout_s: float, note: Callable[[ApiError], object]
) -> None:
    """200 and the events as they come. The head waits for the first one: what fails before it is raised and still has its own
    status; what fails behind it is told by a last event, and to `note`.

    Raises `SlowReaderError` for a reader that takes nothing."""
    event = await anext(events)
    await send({"type": "http.response.start", "status": 200, "headers": EVENT_HEADERS})
    async with asyncio.timeout(None) as timeout:
        patience = _Patience(timeout, write_timeout_s)
        try:
            while True:
                is_last = isinstance(event, Last)
                patience.begin()
                await send({"type": "http.response.body", "body": event, "more_body": not is_last})
                patience.end()
                if is_last:
                    return
                event = await _next(events, note)
        except asyncio.CancelledError:
            if patience.is_over:
                raise SlowReaderError from None
            raise
        finally:
            patience.close()


class SlowReaderError(Exception):
    """A reader took nothing of its stream for too long."""


def let_go_of_slow_readers(listener: socket.socket, write_timeout_s: float) -> None:
    """Have the system drop a connection of this socket whose reader takes nothing for so long, also when its stream was given
    up and what had been written waits for it. Where there is no such option (it is Linux's), that connection stays."""
    if hasattr(socket, "TCP_USER_TIMEOUT"):
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, max(1, int(write_timeout_s * 1000)))


async def _next(events: AsyncGenerator[bytes, None], note: Callable[[ApiError], object]) -> bytes:
    try:
        return await anext(events)
    except Exception as error:  # noqa: BLE001 - every error is told
        await events.aclose()
        told = api_error(error)
        note(told)
        return error_event(told)


class _Patience:
    """Ends `timeout` when one write takes too long. Looks now and then: a timer for each event would cost more than it."""

    def __init__(self, timeout: asyncio.Timeout, most_s: float) -> None:
        self._timeout = timeout
        self._most_s = most_s
        self._began_s: float | None = None
        self.is_over = False
        self._clock = asyncio.get_running_loop()
        self._timer = self._clock.call_later(most_s, self._look)

    def begin(self) -> None:
        """A write begins."""
        self._began_s = self._clock.time()

    def end(self) -> None:
        """It is over."""
        self._began_s = None

    def close(self) -> None:
        """Look no more."""
        self._timer.cancel()

    def _look(self) -> None:
        began_s = self._began_s
        if began_s is None:
            self._timer = self._clock.call_later(self._most_s, self._look)
        elif began_s + self._most_s <= self._clock.time():
            self.is_over = True
            self._timeout.reschedule(self._clock.time())
        else:
            self._timer = self._clock.call_at(began_s + self._most_s, self._look)


async def _send(send: Send, status: int, body: bytes, extra: Mapping[str, str]) -> None:
    headers = [(b"content-type", JSON_TYPE), (b"content-length", str(len(body)).encode())]
    headers += [(name.encode(), value.encode()) for name, value in extra.items()]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
