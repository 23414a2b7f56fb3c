"""Frames on a stream socket: four bytes of length, then one record in msgpack.

Before: `wire.py` says which records there are. After: both ends of the socket between the server and its engine. Always:
bytes in any pieces give the same records; a frame that is too long, or is no record, raises `FrameError` and nothing behind
it is read.
"""

from __future__ import annotations

import struct
from typing import Any, Generic, TypeVar

import msgspec

from ..errors import FrameError

LENGTH = struct.Struct("<I")

MAX_FRAME = 2**28
"""Bytes of one record, at most: far above the longest prompt."""

Record = TypeVar("Record")

_encoder = msgspec.msgpack.Encoder()


def frame(record: Any) -> bytearray:
    """A record as it goes over the socket. Raises `FrameError` if it is longer than the other end would read."""
    buffer = bytearray(LENGTH.size)
    _encoder.encode_into(record, buffer, LENGTH.size)
    size = len(buffer) - LENGTH.size
    if size > MAX_FRAME:
        raise FrameError(f"{size} bytes, at most {MAX_FRAME} may be")
    LENGTH.pack_into(buffer, 0, size)
    return buffer


class FrameReader(Generic[Record]):
    """Puts together what came in pieces. `kinds` is the union of the records that may come."""

    def __init__(self, kinds: Any) -> None:
        self._decoder: msgspec.msgpack.Decoder[Record] = msgspec.msgpack.Decoder(kinds)
        self._rest = bytearray()
        self._is_broken = False

    def feed(self, data: bytes | bytearray | memoryview) -> list[Record]:
        """The records that these bytes made whole. Raises `FrameError`, then and ever after."""
        if self._is_broken:
            raise FrameError("an earlier frame was broken")
        rest = self._rest
        rest += data
        records = []
        start = 0
        try:
            with memoryview(rest) as whole:
                while len(whole) - start >= LENGTH.size:
                    (size,) = LENGTH.unpack_from(whole, start)
                    if size > MAX_FRAME:
                        raise FrameError(f"{size} bytes, at most {MAX_FRAME} may be")
                    end = start + LENGTH.size + size
                    if end > len(whole):
                        break
                    with whole[start + LENGTH.size : end] as body:
                        records.append(self._decode(body))
                    start = end
        except FrameError:
            self._is_broken = True
            raise
        del rest[:start]
        return records

    def _decode(self, body: memoryview) -> Record:
        try:
            return self._decoder.decode(body)
        except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
            raise FrameError(f"no record: {error}") from None
