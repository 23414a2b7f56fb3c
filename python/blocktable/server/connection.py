"""What a connection knows of a request without being waited for: whether its body is whole, and when its client leaves.

Before: `endpoint.py` and `chunk_writer.py` have uvicorn's `receive` and `send`. After: `http_protocol.py` tells the requests of
a connection that is lost. Always: of a request that uvicorn does not read with httptools, or under another protocol than ours,
nothing is known: who asks waits as ASGI has it.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from typing import Any

_CYCLE: Any = None
"""What one request and its answer are to uvicorn."""
if find_spec("httptools") is not None:
    _CYCLE = import_module("uvicorn.protocols.http.httptools_impl").RequestResponseCycle


def cycle_of(bound: Callable[..., Any]) -> Any:
    """The request that this `receive` or `send` is of; None if nothing is known of it."""
    cycle = getattr(bound, "__self__", None)
    return cycle if _CYCLE is not None and isinstance(cycle, _CYCLE) else None


def promise_to_tell(cycle: Any) -> None:
    """Whoever does calls `tell_left` when the client has gone before it had its answer."""
    cycle.when_left = None


def tell_left(cycle: Any) -> None:
    """The client has gone."""
    if cycle.when_left is not None:
        cycle.when_left()


def has_whole_body(receive: Callable[..., Any]) -> bool:
    """No part of the body has to be waited for. False: perhaps."""
    cycle = cycle_of(receive)
    return cycle is not None and not cycle.more_body


def when_left(receive: Callable[..., Any], call: Callable[[], object]) -> bool:
    """Have `call` called when the client leaves. False: that is not known here, or has happened."""
    cycle = cycle_of(receive)
    if cycle is None or not hasattr(cycle, "when_left") or cycle.more_body or cycle.disconnected:
        return False
    cycle.when_left = call
    cycle.flow.resume_reading()  # else the end of the connection is not read either
    return True


def forget(receive: Callable[..., Any]) -> None:
    """What `when_left` took is called no more."""
    cycle_of(receive).when_left = None
