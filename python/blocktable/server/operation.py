"""One row of the table of routes: what it is called, what it reads and replies, and who does it.

Before: `app.py` lists them. After: `endpoint.py` runs one, `openapi.py` describes all.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import msgspec

from .serving import Call, Serving

Answer = msgspec.Struct | AsyncGenerator[bytes, None]

Handler = Callable[[Serving, Call, Any], Awaitable[Answer]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """A route that speaks JSON."""

    method: str
    path: str
    summary: str
    handler: Handler
    body: type[msgspec.Struct] | None = None
    """What its body is read as; None = it has none."""
    reply: type[msgspec.Struct]
    makes_text: bool = False
    """It asks the engine for text: it may stream, and be refused for want of room."""
