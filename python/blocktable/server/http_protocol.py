"""uvicorn's reader of HTTP, as the clients' port uses it: what it refuses because it is no HTTP is counted among the refusals.

Before: a connection has bytes that no request begins with. After: `refusals.py` has one more. Always: what is HTTP goes on as
without it.
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
        def send_400_response(self, msg: str) -> None:
            refusals.note(ApiError(400, msg, code="not_http"))
            super().send_400_response(msg)

    return CountingProtocol
