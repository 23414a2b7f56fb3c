"""Promise: the bytes are those of vLLM 0.32: recorded ones always, and its own structures where it is installed."""

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from typing import Any

import pytest

from blocktable.events import Cleared, Removed, Stored
from blocktable.events.wire import BlockRemoved, BlockStored, Wire, short_hash

from .conftest import World

RECORDED = (
    "93cb3ff80000000000009489a474797065ab426c6f636b53746f726564ac626c6f636b5f6861736865739201cfffffffffffffffffb170"
    "6172656e745f626c6f636b5f68617368c0a9746f6b656e5f69647394010203ce00011170aa626c6f636b5f73697a6502a76c6f72615f69"
    "64c0a66d656469756da3475055a96c6f72615f6e616d65c0a967726f75705f6964780089a474797065ab426c6f636b53746f726564ac62"
    "6c6f636b5f6861736865739107b1706172656e745f626c6f636b5f6861736805a9746f6b656e5f69647392090aaa626c6f636b5f73697a"
    "6502a76c6f72615f6964c0a66d656469756da3475055a96c6f72615f6e616d65c0a967726f75705f6964780384a474797065ac426c6f63"
    "6b52656d6f766564ac626c6f636b5f686173686573920107a66d656469756da3475055a967726f75705f6964780081a474797065b0416c"
    "6c426c6f636b73436c656172656400"
)
"""vLLM's own encoding of the records below."""

RECORDED_WHOLE_KEY = (
    "93cb3ff80000000000009184a474797065ac426c6f636b52656d6f766564ac626c6f636b5f68617368657391c420000102030405060708"
    "090a0b0c0d0e0f101112131415161718191a1b1c1d1e1fa66d656469756da3475055a967726f75705f6964780002"
)


def named(number: int) -> bytes:
    """A key whose last 64 bits are that number."""
    return b"\x55" * 24 + number.to_bytes(8, "big")


RECORDS = [
    Stored(named(1), None, (1, 2), 0),
    Stored(named(2**64 - 1), named(1), (3, 70000), 0),
    Stored(named(7), named(5), (9, 10), 3),
    Removed(named(1), 0),
    Removed(named(7), 0),
    Cleared(),
]


def wire(**changes: Any) -> Wire:
    return Wire(**({"data_parallel_rank": 0, "medium": "GPU", "use_int_block_hashes": True} | changes))


def test_the_bytes_are_those_that_vllm_makes():
    assert wire().encode(1.5, RECORDS, 2).hex() == RECORDED


def test_whole_keys_are_sent_as_bytes():
    removed = [Removed(bytes(range(32)), 0)]
    encoded = wire(use_int_block_hashes=False, data_parallel_rank=2).encode(1.5, removed, 2)
    assert encoded.hex() == RECORDED_WHOLE_KEY


def test_other_bytes_are_seen():
    """The check above can fail."""
    for changes in ({"medium": "CPU"}, {"data_parallel_rank": 1}, {"use_int_block_hashes": False}):
        assert wire(**changes).encode(1.5, RECORDS, 2).hex() != RECORDED
    assert wire().encode(1.5, RECORDS[:-1], 2).hex() != RECORDED


def test_a_chain_becomes_one_event_and_a_fork_begins_another():
    stored = [Stored(named(n), named(n - 1), (n,), 0) for n in (1, 2, 3)]
    fork = Stored(named(9), named(1), (9,), 0)
    events = wire().events([*stored, fork], 1)
    assert all(isinstance(event, BlockStored) for event in events)
    assert [event.block_hashes for event in events] == [[1, 2, 3], [9]]
    assert [event.parent_block_hash for event in events] == [0, 1]
    assert [event.token_ids for event in events] == [[1, 2, 3], [9]]


def test_groups_are_not_mixed():
    events = wire().events([Stored(named(1), None, (1,), 0), Stored(named(2), named(1), (1,), 1)], 1)
    assert [event.group_idx for event in events] == [0, 1]
    events = wire().events([Removed(named(1), 0), Removed(named(1), 1)], 1)
    assert [(type(event), event.group_idx) for event in events] == [(BlockRemoved, 0), (BlockRemoved, 1)]


def test_each_group_is_told_by_its_kind():
    stored = [Stored(named(1), None, (1,), 0), Stored(named(1), None, (1,), 1)]
    full, sliding = wire(windows=(None, 64)).events(stored, 1)
    assert (full.kv_cache_spec_kind, full.kv_cache_spec_sliding_window) == ("full_attention", None)
    assert (sliding.kv_cache_spec_kind, sliding.kv_cache_spec_sliding_window) == ("sliding_window", 64)


def test_a_short_hash_is_the_end_of_the_key():
    assert short_hash(named(12345)) == 12345


PEER = """
import json, sys
import msgspec
from vllm.distributed.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, KVEventBatch
decoder = msgspec.msgpack.Decoder(KVEventBatch)
for line in sys.stdin:
    batch = decoder.decode(bytes.fromhex(line))
    assert msgspec.msgpack.Encoder().encode(batch).hex() == line.strip()
    events = [[type(event).__name__, getattr(event, "block_hashes", None)] for event in batch.events]
    print("DECODED", json.dumps([batch.ts, batch.data_parallel_rank, events]))
"""


def peer() -> str | None:
    """A Python that has vLLM: this one, or the one named by BLOCKTABLE_PEER_PYTHON."""
    return sys.executable if find_spec("vllm") is not None else os.environ.get("BLOCKTABLE_PEER_PYTHON")


@pytest.mark.skipif(peer() is None, reason="vLLM is not installed here, and BLOCKTABLE_PEER_PYTHON names no Python that has it")
def test_vllms_own_structures_decode_what_a_scheduler_tells(seed):
    world, sent = World(seed), [wire().encode(1.5, RECORDS, 2)]
    for _ in range(60):
        world.happen()
    sent.append(wire().encode(2.5, world.snapshot().events, 4))
    lines = "\n".join(message.hex() for message in sent)
    python = peer()
    assert python is not None
    done = subprocess.run([python, "-c", PEER], input=lines, capture_output=True, text=True, timeout=280, check=True)
    first, second = [
        json.loads(line.removeprefix("DECODED ")) for line in done.stdout.splitlines() if line.startswith("DECODED ")
    ]
    assert first[:2] == [1.5, 0]
    assert [event[0] for event in first[2]] == ["BlockStored", "BlockStored", "BlockRemoved", "AllBlocksCleared"]
    names = {name for kind, names in second[2] if kind == "BlockStored" for name in names}
    assert names == {short_hash(key) for _, key in world.published()}
