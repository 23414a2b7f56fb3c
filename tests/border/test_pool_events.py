"""KV events of a pool without a scheduler: whoever applies them has what a snapshot tells at every moment."""

import numpy as np
import pytest

from blocktable import BlockPool, InvalidInputError, PrefixCache
from blocktable.events import Cleared, Removed, Stored, read_records

BLOCK = 4


class Reader:
    """The keys that are published, rebuilt from events alone."""

    def __init__(self, pool: BlockPool, *, hears_removals: bool = True) -> None:
        self.pool = pool
        self.next = 0
        self.keys: set[bytes] = set()
        self.kinds: list[type] = []
        self.hears_removals = hears_removals

    def read(self) -> None:
        data = self.pool.read_events(self.next)
        if data is None:
            return
        records = read_records(data)
        assert records.lost == 0
        assert records.block_size == BLOCK
        for event in records.events:
            self.apply(event)
        self.next = records.next

    def apply(self, event: Stored | Removed | Cleared) -> None:
        self.kinds.append(type(event))
        match event:
            case Stored(key, parent, token_ids, group):
                assert (len(token_ids), group) == (BLOCK, 0)
                assert parent is None or parent in self.keys
                assert key not in self.keys
                self.keys.add(key)
            case Removed(key):
                if self.hears_removals:
                    self.keys.remove(key)
            case Cleared():
                self.keys.clear()


def snapshot(pool: BlockPool) -> set[bytes]:
    data = pool.event_snapshot()
    assert data is not None
    cleared, *stored = read_records(data).events
    assert isinstance(cleared, Cleared)
    assert all(isinstance(event, Stored) for event in stored)
    return {event.key for event in stored if isinstance(event, Stored)}


def play(reader: Reader, seed: int) -> None:
    """Prompts that branch, through a pool that evicts, with resets."""
    pool, rng = reader.pool, np.random.default_rng(seed)
    cache = PrefixCache(pool)
    for _ in range(200):
        what = rng.integers(12)
        if what == 0:
            cache.reset()
        elif what == 1:
            pool.reset()
            cache = PrefixCache(pool)
        else:
            prompt = rng.integers(0, 2, rng.integers(1, 30))
            table, found = cache.match(prompt)
            table.append(len(prompt) - found)
            cache.publish(table, prompt)
            table.release()
        reader.read()
        assert reader.keys == snapshot(pool)


def test_a_reader_has_what_a_snapshot_tells(seed: int) -> None:
    reader = Reader(BlockPool(12, BLOCK, event_buffer_size=1000))
    play(reader, seed)
    assert set(reader.kinds) == {Stored, Removed, Cleared}


def test_a_reader_that_does_not_hear_of_removals_is_noticed(seed: int) -> None:
    with pytest.raises(AssertionError):
        play(Reader(BlockPool(12, BLOCK, event_buffer_size=1000), hears_removals=False), seed)


def test_a_pool_that_records_nothing_tells_nothing() -> None:
    pool = BlockPool(12, BLOCK)
    assert pool.read_events(0) is None
    assert pool.event_snapshot() is None


def test_a_reader_that_fell_behind_is_told_how_much_it_lost() -> None:
    pool = BlockPool(12, BLOCK, event_buffer_size=2)
    with pool.table() as table:
        table.append(5 * BLOCK)
        PrefixCache(pool).publish(table, list(range(5 * BLOCK)))
        data = pool.read_events(0)
        assert data is not None
        records = read_records(data)
        assert (records.lost, len(records.events), records.next) == (3, 2, 5)
        assert len(snapshot(pool)) == 5


@pytest.mark.parametrize("size", [-1, 2**24 + 1, 1.5])
def test_a_size_out_of_bounds_is_refused(size: float) -> None:
    with pytest.raises((InvalidInputError, TypeError)):
        BlockPool(12, BLOCK, event_buffer_size=size)  # type: ignore[arg-type]


def test_a_number_that_no_event_has_had_is_refused() -> None:
    with pytest.raises(InvalidInputError, match="since=1"):
        BlockPool(12, BLOCK, event_buffer_size=2).read_events(1)
