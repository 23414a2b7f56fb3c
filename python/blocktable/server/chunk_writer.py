"""Writes a chunk of a streamed body straight into its connection, where nothing has to be waited for.

Before: `endpoint.py` has uvicorn's `send`. After: `sse.py` writes the events of most tokens so: no task is woken for them, and
no message of ASGI made. Always: what is written stands behind all that was sent; where the connection has gone, its reader is
slow, or the head was not sent, nothing is written, and False returned.
"""

from __future__ import annotations

from collections.abc import Callable

from starlette.types import Send

from .connection import cycle_of

WriteNow = Callable[[bytes], bool]


def write_nothing(body: bytes) -> bool:
    """Of a connection that is written to by `send` only."""
    return False


def chunk_writer(send: Send) -> WriteNow:
    """For the `send` of a request that uvicorn reads with httptools; the body must not be empty."""
    cycle = cycle_of(send)
    if cycle is None:
        return write_nothing
    flow, transport = cycle.flow, cycle.transport

    def write(body: bytes) -> bool:
        if not cycle.chunked_encoding or flow.write_paused or cycle.disconnected or cycle.response_complete:
            return False
        transport.write(b"%x\r\n%b\r\n" % (len(body), body))
        return True

    return write
