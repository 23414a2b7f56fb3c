"""One route at work: reads the body, has it answered while its client is there, and sends what comes of it.

Before: `guard.py` let a request through and Starlette found its route. After: uvicorn has the answer. Always: a body is
bounded in bytes and in time; whoever leaves, at any point, has its work cancelled at once; every error is an answer in
OpenAI's shape, or, where the head of a stream has gone, its last event.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Coroutine, Mapping
from contextlib import aclosing
from typing import Any

from starlette.types import Receive, Scope, Send

from .chunk_writer import chunk_writer
from .connection import forget, has_whole_body, when_left
from .errors import ApiError, api_error
from .guard import TENANT
from .limits import Limits
from .operation import Operation
from .protocol.reading import read
from .reply import SlowReaderError, send_error, send_events, send_record
from .serving import Call, Serving

logger = logging.getLogger("blocktable.server")

TRACE_HEADERS = (b"traceparent", b"tracestate")

LONG_BODY_BYTES = 2**16
"""A body above it is read on another thread, so that the event loop has its turns meanwhile."""


class Endpoint:
    """An ASGI application for one operation."""

    def __init__(self, operation: Operation, serving: Serving) -> None:
        self._operation = operation
        self._serving = serving

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See ASGI."""
        headers = dict(scope["headers"])
        call = Call(
            tenant=scope[TENANT],
            path=scope.get("path_params", {}),
            trace_headers=_trace_headers(headers),
            write_now=chunk_writer(send),
        )
        try:
            ask = None
            if self._operation.body is not None:
                body = await _read_body(headers, receive, self._serving.limits)
                ask = await _read(body, self._operation.body)
        except _LeftError:
            return
        except Exception as error:  # noqa: BLE001 - every error is an answer
            await self._refuse(send, error)
            return
        await _while_there(receive, self._answer(call, ask, send))

    async def _answer(self, call: Call, ask: Any, send: Send) -> None:
        limits = self._serving.limits
        try:
            answer = await self._operation.handler(self._serving, call, ask)
            if isinstance(answer, AsyncGenerator):
                async with aclosing(answer):
                    await send_events(send, answer, limits.write_timeout_s, self._serving.refusals.note_later)
            else:
                await send_record(send, answer)
        except SlowReaderError:
            # The head has gone, and the connection is closed: an answer that is not whole looks so.
            logger.warning("a reader took nothing for %g s: its request was ended", limits.write_timeout_s)
        except Exception as error:  # noqa: BLE001 - every error is an answer
            await self._refuse(send, error)

    async def _refuse(self, send: Send, error: Exception) -> None:
        told = api_error(error)
        self._serving.refusals.note(told)
        await send_error(send, told)


class _LeftError(Exception):
    """The client left before its body was whole."""


async def _while_there(receive: Receive, work: Coroutine[Any, Any, None]) -> None:
    """Do `work`; cancel it when the client leaves. Whatever happens, it is over when this returns."""
    watch = _Watch(receive)
    try:
        await work
    except asyncio.CancelledError:
        if not watch.take_back():
            raise
    finally:
        await watch.end()


class _Watch:
    """Cancels the task that makes it when the client leaves."""

    def __init__(self, receive: Receive) -> None:
        self._has_left = False
        self._working = asyncio.current_task()
        self._receive = receive
        # Where the connection tells by itself, no task has to wait for it.
        is_told = when_left(receive, self._leave)
        self._task = None if is_told else asyncio.ensure_future(self._watch(receive))

    def take_back(self) -> bool:
        """The task was cancelled: take back what was done here; whether that was all."""
        return self._has_left and self._working is not None and self._working.uncancel() == 0

    async def _watch(self, receive: Receive) -> None:
        await _left(receive)
        self._leave()

    def _leave(self) -> None:
        # It is called while the work waits, so that the work alone is cancelled by it.
        self._has_left = True
        if self._working is not None:
            self._working.cancel()

    async def end(self) -> None:
        """Watch no more. Nothing of it is used again."""
        task = self._task
        # A cancelled task keeps the frames that it stood in: with these they would keep it, until a full collection.
        del self._task, self._working
        if task is None:
            forget(self._receive)
            return
        task.cancel()
        await asyncio.wait((task,))


async def _left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _trace_headers(headers: Mapping[bytes, bytes]) -> dict[str, str]:
    return {name.decode(): headers[name].decode("latin-1") for name in TRACE_HEADERS if name in headers}


async def _read_body(headers: Mapping[bytes, bytes], receive: Receive, limits: Limits) -> bytes:
    kind = headers.get(b"content-type", b"").decode("latin-1").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise ApiError(415, f"the content type must be application/json, not {kind[:100] or 'left out'}", code="not_json")
    if headers.get(b"content-encoding", b"identity").lower() != b"identity":
        raise ApiError(415, "the body must not be encoded (content-encoding)", code="encoded_body")
    said = headers.get(b"content-length", b"0")
    if said.isdigit() and int(said[:20]) > limits.max_body_bytes:
        raise _too_large(limits)
    if has_whole_body(receive):
        return await _gather_body(receive, limits)
    try:
        async with asyncio.timeout(limits.body_timeout_s):
            return await _gather_body(receive, limits)
    except TimeoutError:
        message = f"the body did not come within {limits.body_timeout_s:g} s"
        raise ApiError(408, message, code="body_timeout", headers={"connection": "close"}) from None


async def _read(body: bytes, kind: type[Any]) -> Any:
    if len(body) <= LONG_BODY_BYTES:
        return read(body, kind)
    return await asyncio.to_thread(read, body, kind)


async def _gather_body(receive: Receive, limits: Limits) -> bytes:
    parts, size = [], 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise _LeftError
        part: bytes = message.get("body", b"")
        size += len(part)
        if size > limits.max_body_bytes:
            raise _too_large(limits)
        parts.append(part)
        if not message.get("more_body", False):
            return b"".join(parts)


def _too_large(limits: Limits) -> ApiError:
    message = f"the body is larger than {limits.max_body_bytes} bytes"
    return ApiError(413, message, code="body_too_large", headers={"connection": "close"})
