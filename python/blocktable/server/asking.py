"""A question to the engine on behalf of an operator, and what is said if no answer comes.

Before: a route of the admin port. After: an `EngineClient`. Always: an answer within `PATIENCE_S`, if only 503.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from starlette.responses import JSONResponse, Response

from ..errors import BlocktableError, InvalidInputError, NoSuchBlockError, UnknownRequestError

PATIENCE_S = 5.0
"""Seconds to wait for an answer of the engine."""

T = TypeVar("T")


async def answered(ask: Callable[[], Awaitable[T]], show: Callable[[T], Response], **known: Any) -> Response:
    """What the engine said, or why it did not; `known` is told in either case."""
    try:
        return show(await asyncio.wait_for(ask(), PATIENCE_S))
    except (InvalidInputError, NoSuchBlockError, UnknownRequestError) as error:
        return JSONResponse({"error": str(error)}, 404)
    except BlocktableError as error:
        return JSONResponse({"error": str(error), **known}, 503)
    except TimeoutError:
        return JSONResponse({"error": f"the engine has not answered for {PATIENCE_S:g} s", **known}, 503)
