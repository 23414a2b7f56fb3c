"""The core's event bytes as plain records. The layout is told in `rust/core/src/event_bytes.rs`.

Before: `Scheduler.read_events` or `event_snapshot`. After: `wire.py`, or a reader's own index. Bytes that hold no events are
refused with the place where they break.
"""

from __future__ import annotations

from struct import Struct
from struct import error as StructError
from typing import NamedTuple, TypeAlias

from ..errors import InvalidInputError

_HEADER = Struct("<QQII")
_EVENT = Struct("<BBBB")
_KEY_BYTES = 32
STORED, REMOVED, CLEARED = 1, 2, 3


class Stored(NamedTuple):
    """A key got its first published block."""

    key: bytes
    parent: bytes | None
    """Key of the block before it; None at the start of a chain."""
    token_ids: tuple[int, ...]
    group: int


class Removed(NamedTuple):
    """A key lost its last published block."""

    key: bytes
    group: int


class Cleared(NamedTuple):
    """Every key is gone."""


Record: TypeAlias = Stored | Removed | Cleared


class Records(NamedTuple):
    """Events in the order in which they happened."""

    next: int
    """Number to read on from."""
    lost: int
    """Events that were overwritten before these: if any, start again from a snapshot."""
    block_size: int
    events: list[Record]


def read_header(data: bytes) -> tuple[int, int]:
    """The number to read on from, and how many events were lost, of bytes that the core made."""
    following, lost, _, _ = _HEADER.unpack_from(data)
    return following, lost


def read_records(data: bytes) -> Records:
    """The events in these bytes. Raises `InvalidInputError` with the byte where they break."""
    at = 0
    try:
        following, lost, count, block_size = _HEADER.unpack_from(data)
        at = _HEADER.size
        if count > (len(data) - at) // _EVENT.size:
            raise InvalidInputError("event bytes", at, "more events are announced than there are bytes for")
        tokens = Struct(f"<{block_size}I")
        events: list[Record] = []
        for _ in range(count):
            kind, group, has_parent, zero = _EVENT.unpack_from(data, at)
            if zero or has_parent > (kind == STORED):
                raise InvalidInputError(
                    "event bytes", at, "an event begins with its kind, its group, and whether it has a parent"
                )
            at += _EVENT.size
            if kind == STORED:
                key, at = _key(data, at)
                parent = None
                if has_parent:
                    parent, at = _key(data, at)
                events.append(Stored(key, parent, tokens.unpack_from(data, at), group))
                at += tokens.size
            elif kind == REMOVED:
                key, at = _key(data, at)
                events.append(Removed(key, group))
            elif kind == CLEARED and group == 0:
                events.append(Cleared())
            else:
                raise InvalidInputError("event bytes", at, "an event is stored (1), removed (2) or cleared (3, group 0)")
    except (StructError, OverflowError, MemoryError) as error:
        raise InvalidInputError("event bytes", at, f"the bytes end here ({error})") from None
    if at != len(data):
        raise InvalidInputError("event bytes", at, "bytes follow the last event")
    return Records(following, lost, block_size, events)


def _key(data: bytes, at: int) -> tuple[bytes, int]:
    key = data[at : at + _KEY_BYTES]
    if len(key) < _KEY_BYTES:
        raise InvalidInputError("event bytes", at, "the bytes end here")
    return key, at + _KEY_BYTES
