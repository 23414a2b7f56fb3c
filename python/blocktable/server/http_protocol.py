"""uvicorn's reader of HTTP, as the clients' port uses it: what it refuses because it is no HTTP is counted among the refusals,
and of a connection that is lost each request is told.

Before: uvicorn has bytes of a connection, or its end. After: `refusals.py` has one more; `endpoint.py` cancels the work of who
left. Always: what is HTTP goes on as without it.
"""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.auto import AutoHTTPProtocol

from .errors import ApiError
from .refusals import Refusals


def counting_protocol(refusals: Refusals) -> type[asyncio.Protocol]:
    """The class that uvicorn makes one of for each connection: its own, for httptools or h11, whichever is installed."""
    base: Any = AutoHTTPProtocol

    class CountingProtocol(base):  # type: ignore[misc]
        _open: tuple[Any, ...] = ()
        """The requests whose answers are not complete, the oldest first. A client may send several before it has any."""

        def on_headers_complete(self) -> None:  # httptools alone: h11 begins no request before the last is answered
            super().on_headers_complete()
            self._open = tuple(one for one in (*self._open, self.cycle) if one is not None and not one.response_complete)

        def connection_lost(self, exc: Exception | None) -> None:
            super().connection_lost(exc)  # which tells the newest one
            for one in self._open:
                if not one.response_complete:
                    one.disconnected = True
                    one.message_event.set()
            self._open = ()

        def send_400_response(self, msg: str) -> None:
            refusals.note(ApiError(400, msg, code="not_http"))
            super().send_400_response(msg)

    return CountingProtocol
