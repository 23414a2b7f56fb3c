"""Server-sent events of a stream, written into templates: of an event only the text and its ends are encoded.

Before: a `Generation` has pieces. After: `reply.py` sends bytes; `chunk_writer.py` writes what comes while nothing before it
waits, which is most. Always: what stands in an event is JSON, whatever the text and the model's name hold; an event is one
`data:` line and an empty one.
"""

from __future__ import annotations

from abc import ABC
from collections.abc import AsyncGenerator
from contextlib import aclosing
from functools import partial
from typing import ClassVar

import msgspec

from .chunk_writer import WriteNow, write_nothing
from .engine_client import Piece
from .errors import ApiError
from .generation import Generation
from .logprobs import NO_LOGPROBS

DONE = b"data: [DONE]\n\n"

_encode = msgspec.json.encode


class Last(bytes):
    """The last of a stream, which goes along with the end of the body: a write less."""


class Events(ABC):
    """Of one stream."""

    KIND: ClassVar[str]
    """What the `object` of an event says."""
    SAID: ClassVar[bytes]
    """The field of an event that has the text."""
    NOTHING: ClassVar[bytes]
    """The same, where there is none."""

    def __init__(self, generation: Generation, *, includes_usage: bool, write_now: WriteNow = write_nothing) -> None:
        """Without `write_now` every event is one of `stream`."""
        head = {"id": generation.id, "object": self.KIND, "created": generation.created, "model": generation.model}
        self._generation = generation
        self._includes_usage = includes_usage
        self._write_now = write_now
        # The record is left open behind its last field.
        self._head = b"data: " + _encode(head)[:-1]
        # With the usage asked for, every event before the last says that it is not known yet.
        self._tail = b',"usage":null}\n\n' if includes_usage else b"}\n\n"
        self._going_on = b',"logprobs":null,"finish_reason":null}]' + self._tail
        self._begun: dict[int, bytes] = {}
        """What stands before the text in the events of each answer that has begun."""

    async def stream(self) -> AsyncGenerator[bytes, None]:
        """All of them, as pieces come. Leaving it ends all answers."""
        generation, last = self._generation, b""
        # Not kept: it would keep these events, and all that they lead to, until a full collection.
        at_once = None if self._write_now is write_nothing else self._write
        async with aclosing(generation.pieces(at_once)) as pieces:
            async for place, piece in pieces:
                opening = b"" if place in self._begun else self._begin(place)
                logprobs = NO_LOGPROBS if piece.logprobs is None else await generation.written(place, piece.logprobs)
                # What a slow reader missed is one piece, and calls are read in it character by character.
                said = await generation.beside(len(piece.text), partial(self._said, place, piece))
                if generation.is_over:  # what follows is no wait, and goes along
                    last = opening + self._event(place, piece, said, logprobs)
                elif said or piece.finish_reason is not None or logprobs is not NO_LOGPROBS:
                    yield opening + self._event(place, piece, said, logprobs)
                elif opening:  # a token may be half a character: then its text is nothing to tell yet
                    yield opening
        yield Last(last + self._end())

    def _opening(self, place: int) -> bytes:
        """What comes before the first piece of an answer."""
        return b""

    def _begin(self, place: int) -> bytes:
        self._begun[place] = b'%b,"choices":[{"index":%d,' % (self._head, place)
        return self._opening(place)

    def _write(self, piece: Piece) -> bool:
        """See `Generation.pieces`. It is a piece of the only prompt, and all before it were sent."""
        before = self._begun.get(piece.index)
        if before is None or piece.logprobs is not None:
            return False
        said = self._said(piece.index, piece)
        if said and not self._write_now(before + said + self._going_on):
            return False
        self._generation.tallies[piece.index].add(piece)
        return True

    def _said(self, place: int, piece: Piece) -> bytes:
        """The field of an event that has the text; empty if nothing is to be told yet."""
        return self.SAID % _encode(piece.text) if piece.text else b""

    def _reason(self, place: int, piece: Piece) -> str | None:
        """Why the answer ended, if it did."""
        return piece.finish_reason

    def _event(self, place: int, piece: Piece, said: bytes, logprobs: bytes) -> bytes:
        ending = _ending(self._reason(place, piece), piece)
        return b'%b%b,"logprobs":%b,%b}]%b' % (self._begun[place], said or self.NOTHING, logprobs, ending, self._tail)

    def _end(self) -> bytes:
        """The usage, with no choices, if it was asked for, and the word that ends a stream."""
        if not self._includes_usage:
            return DONE
        return b'%b,"choices":[],"usage":%b}\n\n%b' % (self._head, _encode(self._generation.usage), DONE)


class CompletionEvents(Events):
    """Of a completion."""

    KIND = "text_completion"
    SAID = b'"text":%b'
    NOTHING = SAID % b'""'


class ChatEvents(Events):
    """Of a chat, where each answer begins with its role."""

    KIND = "chat.completion.chunk"
    SAID = b'"delta":{"content":%b}'
    NOTHING = SAID % b'""'

    def _opening(self, place: int) -> bytes:
        choice = b'{"index":%d,"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}' % place
        return b'%b,"choices":[%b]%b' % (self._head, choice, self._tail)


def error_event(error: ApiError) -> Last:
    """What went wrong after the head had gone. The stream ends behind it, without `[DONE]`."""
    return Last(b"data: %b\n\n" % _encode(error.reply))


def _ending(reason: str | None, piece: Piece) -> bytes:
    if reason is None:
        return b'"finish_reason":null'
    return b'"finish_reason":%b,"stop_reason":%b' % (_encode(reason), _encode(piece.stop_reason))
