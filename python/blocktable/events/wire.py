"""Events as vLLM 0.32 sends them: msgpack of `[ts, events, data_parallel_rank]`, each event a map with its name as `type`.

Before: `publisher.py` has records of the core. After: bytes that any consumer of vLLM's events decodes. Events of one chain
that follow each other become one `BlockStored`, removals of one group one `BlockRemoved`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, TypeAlias

import msgspec

from .records import Cleared, Record, Removed, Stored

Hash: TypeAlias = int | bytes


class BlockStored(msgspec.Struct, omit_defaults=True, gc=False, tag=True):
    """Blocks of one chain were published, in its order."""

    block_hashes: list[Hash]
    parent_block_hash: Hash | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[tuple[Any, ...] | None] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None


class BlockRemoved(msgspec.Struct, omit_defaults=True, gc=False, tag=True):
    """The last block of each of these keys is gone."""

    block_hashes: list[Hash]
    medium: str | None
    group_idx: int | None = None


class AllBlocksCleared(msgspec.Struct, omit_defaults=True, gc=False, tag=True):
    """Nothing is published any more."""


Event: TypeAlias = BlockStored | BlockRemoved | AllBlocksCleared


class KVEventBatch(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """What one message brings."""

    ts: float
    """Seconds since 1970 at which the events were read."""
    events: list[Event]
    data_parallel_rank: int | None = None


class Wire:
    """Turns records into messages. Not shared between threads."""

    def __init__(
        self,
        *,
        data_parallel_rank: int,
        medium: str,
        use_int_block_hashes: bool,
        windows: Sequence[int | None] = (),
    ) -> None:
        self._rank = data_parallel_rank
        self._windows = windows
        self._medium = medium
        self._hash = short_hash if use_int_block_hashes else bytes
        self._encoder = msgspec.msgpack.Encoder()

    def encode(self, ts: float, records: Iterable[Record], block_size: int) -> bytes:
        """One message."""
        return self._encoder.encode(KVEventBatch(ts, self.events(records, block_size), self._rank))

    def events(self, records: Iterable[Record], block_size: int) -> list[Event]:
        """The events of one message."""
        events: list[Event] = []
        last: Event | None = None
        end: bytes | None = None  # key of the last block of `last`, if it stores some
        for record in records:
            if isinstance(record, Stored):
                if isinstance(last, BlockStored) and end == record.parent and last.group_idx == record.group:
                    last.block_hashes.append(self._hash(record.key))
                    last.token_ids.extend(record.token_ids)
                else:
                    last = self._stored(record, block_size)
                    events.append(last)
                end = record.key
            elif isinstance(record, Removed):
                if isinstance(last, BlockRemoved) and last.group_idx == record.group:
                    last.block_hashes.append(self._hash(record.key))
                else:
                    last = BlockRemoved([self._hash(record.key)], self._medium, record.group)
                    events.append(last)
            elif isinstance(record, Cleared):
                last = AllBlocksCleared()
                events.append(last)
        return events

    def _stored(self, record: Stored, block_size: int) -> BlockStored:
        kind, window = None, None
        if record.group < len(self._windows):
            window = self._windows[record.group]
            kind = "full_attention" if window is None else "sliding_window"
        return BlockStored(
            block_hashes=[self._hash(record.key)],
            parent_block_hash=None if record.parent is None else self._hash(record.parent),
            token_ids=list(record.token_ids),
            block_size=block_size,
            lora_id=None,
            medium=self._medium,
            lora_name=None,
            group_idx=record.group,
            kv_cache_spec_kind=kind,
            kv_cache_spec_sliding_window=window,
        )


def short_hash(key: bytes) -> int:
    """The last 64 bits of a key, as the number by which vLLM's events name a block."""
    return int.from_bytes(key[-8:], "big")
