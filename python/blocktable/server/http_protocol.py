"""uvicorn's reader of HTTP, as both ports use it: a connection has so many bytes and so much time for a head, and what it
refuses because it is no HTTP is counted among the refusals.

Before: uvicorn has bytes of a connection, or its end. After: `refusals.py` has one more; `connection.py` tells `endpoint.py` of
who left. Always: who has not said what he wants holds bounded memory for a bounded time; a client of HTTP/1.0 gets no chunks;
of a connection that is lost each request is told; what is HTTP goes on as without it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from uvicorn.protocols.http.auto import AutoHTTPProtocol

from .connection import promise_to_tell, tell_left
from .errors import ApiError
from .http_parser import asks_for_another, parser_of
from .refusals import Refusals

MAX_HEAD_BYTES = 2**16
"""Of a head, or of trailers. httptools takes any number, and copies what it has of a header whenever more of it comes."""


def counting_protocol(refusals: Refusals, head_timeout_s: float = 30.0) -> type[asyncio.Protocol]:
    """The class that uvicorn makes one of for each connection: its own, for httptools or h11, whichever is installed. What
    begins with `on_` is httptools' alone: h11 bounds heads by itself, and begins no request before the last is answered."""
    base: Any = AutoHTTPProtocol
    has_callbacks = hasattr(base, "on_headers_complete")
    most_outside = MAX_HEAD_BYTES if has_callbacks else float("inf")

    class CountingProtocol(base):  # type: ignore[misc]
        _open: tuple[Any, ...] = ()
        """The requests whose answers are not complete, the oldest first. A client may send several before it has any."""
        _num_outside = 0
        """Bytes since the last that were of a body or ended a head."""
        _patience: asyncio.TimerHandle | None = None
        """Of a connection on which a head is due."""

        def __init__(self, *given: Any, **named: Any) -> None:
            super().__init__(*given, **named)
            if has_callbacks:
                self.parser = parser_of(self)

        def connection_made(self, transport: asyncio.BaseTransport) -> None:
            super().connection_made(transport)
            # It may rest, as between two requests.
            self.timeout_keep_alive_task = self.loop.call_later(self.timeout_keep_alive, self.timeout_keep_alive_handler)

        def data_received(self, data: bytes) -> None:
            self._num_outside += len(data)
            super().data_received(data)
            if self.transport.is_closing():
                return
            is_busy = self.cycle is not None and not self.cycle.response_complete
            if is_busy:
                self._stop_waiting()
            elif self._patience is None:
                self._patience = self.loop.call_later(head_timeout_s, self.transport.close)
            if self._num_outside > most_outside:
                if is_busy:  # an answer may be under way, and nothing goes between its parts
                    self.transport.close()
                else:
                    self.send_400_response(f"The head of a request is larger than {MAX_HEAD_BYTES} bytes.")

        def on_headers_complete(self) -> None:
            self._num_outside = 0
            if asks_for_another(self.parser):
                return
            super().on_headers_complete()
            promise_to_tell(self.cycle)
            self._open = tuple(one for one in (*self._open, self.cycle) if one is not None and not one.response_complete)
            if self.scope["http_version"] == "1.0":
                self.cycle.send = _unchunked(self.cycle)

        def on_body(self, body: bytes) -> None:
            self._num_outside = 0
            super().on_body(body)

        def on_message_complete(self) -> None:
            if not asks_for_another(self.parser):
                super().on_message_complete()

        def connection_lost(self, exc: Exception | None) -> None:
            self._stop_waiting()
            super().connection_lost(exc)  # which tells the newest one
            for one in self._open:
                if not one.response_complete:
                    one.disconnected = True
                    one.message_event.set()
                    tell_left(one)
            self._open = ()

        def send_400_response(self, msg: str) -> None:
            refusals.note(ApiError(400, msg, code="not_http"))
            super().send_400_response(msg)

        def _stop_waiting(self) -> None:
            if self._patience is not None:
                self._patience.cancel()
                self._patience = None

    return CountingProtocol


def _unchunked(cycle: Any) -> Callable[[Any], Awaitable[None]]:
    """`send` of an answer to HTTP/1.0: its body, if no length was told, ends with the connection."""
    send: Callable[[Any], Awaitable[None]] = cycle.send
    cycle.chunked_encoding = False

    async def send_plainly(message: Any) -> None:
        if message["type"] == "http.response.body":
            cycle.expected_content_length = len(message.get("body", b""))
        await send(message)

    return send_plainly
