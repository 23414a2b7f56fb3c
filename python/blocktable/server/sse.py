"""Server-sent events of a stream, written into templates: of an event only the text and its ends are encoded.

Before: `completions.py` and `chat.py` have pieces. After: `reply.py` sends bytes. Always: what stands in an event is JSON,
whatever the text and the model's name hold; an event is one `data:` line and an empty one.
"""

from __future__ import annotations

import msgspec

from .engine_client import Piece
from .errors import ApiError
from .generation import Generation
from .logprobs import NO_LOGPROBS

DONE = b"data: [DONE]\n\n"

_encode = msgspec.json.encode


class Last(bytes):
    """The last of a stream, which goes along with the end of the body: a write less."""


class Events:
    """Of one stream. `kind` is what its `object` says."""

    def __init__(self, generation: Generation, kind: str, *, includes_usage: bool) -> None:
        head = {"id": generation.id, "object": kind, "created": generation.created, "model": generation.model}
        self._generation = generation
        self._includes_usage = includes_usage
        # The record is left open behind its last field.
        self._head = b"data: " + _encode(head)[:-1]
        # With the usage asked for, every event before the last says that it is not known yet.
        self._tail = b',"usage":null}\n\n' if includes_usage else b"}\n\n"

    def text(self, place: int, piece: Piece, logprobs: bytes = NO_LOGPROBS) -> bytes:
        """A completion's piece."""
        return b'%b,"choices":[{"index":%d,"text":%b,"logprobs":%b,%b}]%b' % (
            self._head,
            place,
            _encode(piece.text),
            logprobs,
            _end(piece),
            self._tail,
        )

    def role(self, place: int) -> bytes:
        """A chat's first event."""
        choice = b'{"index":%d,"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}' % place
        return b'%b,"choices":[%b]%b' % (self._head, choice, self._tail)

    def content(self, place: int, piece: Piece, logprobs: bytes = NO_LOGPROBS) -> bytes:
        """A chat's piece."""
        return b'%b,"choices":[{"index":%d,"delta":{"content":%b},"logprobs":%b,%b}]%b' % (
            self._head,
            place,
            _encode(piece.text),
            logprobs,
            _end(piece),
            self._tail,
        )

    def end(self) -> bytes:
        """The usage, with no choices, if it was asked for, and the word that ends a stream."""
        if not self._includes_usage:
            return DONE
        return b'%b,"choices":[],"usage":%b}\n\n%b' % (self._head, _encode(self._generation.usage), DONE)


def error_event(error: ApiError) -> Last:
    """What went wrong after the head had gone. The stream ends behind it, without `[DONE]`."""
    return Last(b"data: %b\n\n" % _encode(error.reply))


def _end(piece: Piece) -> bytes:
    if piece.finish_reason is None:
        return b'"finish_reason":null'
    return b'"finish_reason":%b,"stop_reason":%b' % (_encode(piece.finish_reason), _encode(piece.stop_reason))
