"""Clients of an OpenAI server, as cheap as they can be in Python: one connection a request, bytes kept until the end.

Before: `serve.py` has a server's address. After: an `Answer` for each request. Always: what comes is looked at
when the answer is whole, so that a thousand clients cost the machine little beside the server that they measure. Any server
that speaks HTTP/1.1 will do.
"""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast
from urllib.parse import urlsplit

from ..errors import BlocktableError

_EVENT = re.compile(rb"data: (\{.*\})\n\n")

END_OF_CHUNKS = b"0\r\n\r\n"


@dataclass(frozen=True, slots=True)
class Answer:
    """One request's. Times are seconds of one monotonic clock."""

    text: str
    num_tokens: int  # by its usage
    num_events: int  # with text in them; 1 if it is not streamed
    asked_s: float
    first_s: float  # when its first text had come: a head alone, or who speaks, is no answer yet
    last_s: float


async def ask_all(url: str, path: str, bodies: Sequence[Mapping[str, Any]], at_once: int) -> list[Answer]:
    """The answers in order, at most `at_once` open at a time. Raises `BlocktableError` for one that is none."""
    parts = urlsplit(url)
    room = asyncio.Semaphore(at_once)

    async def ask(body: Mapping[str, Any]) -> Answer:
        async with room:
            exchange = _Exchange(_request(parts.netloc, path, body))
            await asyncio.get_running_loop().create_connection(lambda: exchange, parts.hostname or "", parts.port or 80)
            return await exchange.answer()

    return list(await asyncio.gather(*map(ask, bodies)))


def get(url: str) -> str:
    """What stands there. Raises `OSError`."""
    from urllib.request import urlopen

    with urlopen(url, timeout=60) as answer:
        text: str = answer.read().decode()
        return text


class _Exchange(asyncio.Protocol):
    """One request and what comes of it, on a connection of its own."""

    def __init__(self, request: bytes) -> None:
        self._request = request
        self._came = bytearray()
        self._asked_s = 0.0
        self._marks: list[tuple[int, float]] = []  # how much had come, and when
        self._is_over = asyncio.get_running_loop().create_future()

    async def answer(self) -> Answer:
        """Once it is whole."""
        await self._is_over
        head, _, body = bytes(self._came).partition(b"\r\n\r\n")
        status = head.split(b" ", 2)[1]
        if b"transfer-encoding: chunked" in head.lower():
            body = _dechunked(body)
        if status != b"200":
            raise BlocktableError(f"the server answered {status.decode()}: {body[:300].decode(errors='replace')}")
        texts, num_tokens = _streamed(body) if body.startswith(b"data: ") else _whole(json.loads(body))
        first = _end_of_first_text(bytes(self._came))
        first_s = next(when_s for size, when_s in self._marks if size >= first)
        return Answer("".join(texts), num_tokens, len(texts), self._asked_s, first_s, self._marks[-1][1])

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._asked_s = time.monotonic()
        cast(asyncio.Transport, transport).write(self._request)

    def data_received(self, data: bytes) -> None:
        self._came += data
        self._marks.append((len(self._came), time.monotonic()))

    def connection_lost(self, exc: Exception | None) -> None:
        if not self._is_over.done():
            self._is_over.set_result(None)


def _request(host: str, path: str, body: Mapping[str, Any]) -> bytes:
    """It asks for the connection to be closed behind the answer: its end is the answer's."""
    content = json.dumps(body).encode()
    head = [f"POST {path} HTTP/1.1", f"Host: {host}", "Content-Type: application/json", "Connection: close"]
    return "\r\n".join([*head, f"Content-Length: {len(content)}", "", ""]).encode() + content


def _dechunked(body: bytes) -> bytes:
    parts, at = [], 0
    while not body.startswith(END_OF_CHUNKS, at):
        line_end = body.find(b"\r\n", at)
        if line_end < 0:
            raise BlocktableError("the answer is not whole")
        size = int(body[at:line_end], 16)
        parts.append(body[line_end + 2 : line_end + 2 + size])
        at = line_end + 2 + size + 2
    return b"".join(parts)


def _streamed(body: bytes) -> tuple[list[str], int]:
    """Texts and the number of tokens of a stream of events."""
    texts, num_tokens = [], 0
    lines = [line.removeprefix(b"data: ") for line in body.split(b"\n\n") if line]
    if lines[-1] != b"[DONE]":
        raise BlocktableError(f"the stream ends with {lines[-1][:300].decode(errors='replace')}")
    for line in lines[:-1]:
        event = json.loads(line)
        texts += [text for choice in event["choices"] if (text := _text(choice.get("delta", choice)))]
        num_tokens = (event.get("usage") or {}).get("completion_tokens", num_tokens)
    return texts, num_tokens


def _end_of_first_text(came: bytes) -> int:
    """Where the first event with text in it ends, in all that came; the end of all of it if there is none."""
    for found in _EVENT.finditer(came):
        if any(_text(choice.get("delta", choice)) for choice in json.loads(found[1])["choices"]):
            return found.end()
    return len(came)


def _whole(record: Mapping[str, Any]) -> tuple[list[str], int]:
    return [_text(choice.get("message", choice)) for choice in record["choices"]], record["usage"]["completion_tokens"]


def _text(part: Mapping[str, Any]) -> str:
    return part.get("text") or part.get("content") or ""
