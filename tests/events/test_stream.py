"""Promise: whoever applies the core's events in order has its index, after every step; who fell behind is told."""

import numpy as np
import pytest

from blocktable import InvalidInputError, Scheduler, _core
from blocktable.events import Cleared, Removed, Stored, read_records

from .conftest import SIZES, World


class Reader:
    """Rebuilds the index from events."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.next = 0
        self.keys: set[tuple[int, bytes]] = set()
        self.restarts = 0

    def read(self) -> None:
        data = self.world.scheduler.read_events(self.next)
        if data is None:
            return
        records = read_records(data)
        assert records.next == self.next + records.lost + len(records.events)
        if records.lost:
            self.restarts += 1
            records, self.keys = self.world.snapshot(), {(9, b"nothing of what was")}
        for event in records.events:
            if isinstance(event, Stored):
                assert (event.group, event.key) not in self.keys
                assert len(event.token_ids) == records.block_size
                self.keys.add((event.group, event.key))
            elif isinstance(event, Removed):
                self.keys.remove((event.group, event.key))
            else:
                assert isinstance(event, Cleared)
                self.keys.clear()
        self.next = records.next


def follow(world: World, steps: int) -> Reader:
    reader = Reader(world)
    for _ in range(steps):
        world.happen()
        reader.read()
        assert reader.keys == world.published()
        assert len(reader.keys) <= len(world.scheduler.published_blocks())
    return reader


def test_the_index_rebuilt_from_the_stream_equals_the_index_after_every_step(world):
    reader = follow(world, 1500)
    assert reader.restarts == 0
    assert reader.next > 1000
    world.scheduler.audit()


def test_a_reader_that_fell_behind_is_told_and_starts_from_a_snapshot(seed):
    reader = follow(World(seed, event_buffer_size=2), 600)
    assert reader.restarts > 10


def test_a_stored_block_names_its_parent_and_its_tokens():
    scheduler = Scheduler(**SIZES, event_buffer_size=8)
    scheduler.submit(list(range(10)), max_tokens=1)
    plan = scheduler.plan(0)
    assert scheduler.read_events(0) is None, "nothing is told before it is confirmed"
    scheduler.commit(plan.step, np.array([7]), np.array([0, 1]), 0)
    data = scheduler.read_events(0)
    assert data is not None
    first, second = read_records(data).events
    keys = _core.BlockHasher(block_size=4).keys(list(range(8)))
    assert first == Stored(bytes(keys[0]), None, (0, 1, 2, 3), 0)
    assert second == Stored(bytes(keys[1]), bytes(keys[0]), (4, 5, 6, 7), 0)


def test_without_a_ring_nothing_is_recorded():
    scheduler = Scheduler(**SIZES)
    assert (scheduler.read_events(0), scheduler.event_snapshot()) == (None, None)
    assert scheduler.config["event_buffer_size"] == 0


def test_nobody_reads_what_has_not_happened(world):
    with pytest.raises(InvalidInputError) as refused:
        world.scheduler.read_events(1)
    assert (refused.value.field, refused.value.value) == ("since", 1)


@pytest.mark.parametrize("damage", ["cut", "longer", "kind", "count", "parent", "empty"])
def test_bytes_that_hold_no_events_are_refused_by_the_place_where_they_break(world, damage):
    while not world.published():
        world.happen()
    data = bytearray(world.scheduler.event_snapshot() or b"")
    read_records(bytes(data))
    if damage == "cut":
        for length in range(len(data)):
            with pytest.raises(InvalidInputError, match="event bytes="):
                read_records(bytes(data[:length]))
        return
    if damage == "longer":
        data += b"\0"
    elif damage == "kind":
        data[24] = 9
    elif damage == "count":
        data[16:20] = b"\xff" * 4
    elif damage == "parent":
        data[26] = 1
    elif damage == "empty":
        data.clear()
    with pytest.raises(InvalidInputError, match="event bytes="):
        read_records(bytes(data))


@pytest.mark.mutant
@pytest.mark.parametrize(
    "fault",
    ["event_removal_forgotten", "event_pending", "event_number_skipped", "event_clears_held", "event_count_wrong"],
)
def test_a_planted_fault_is_caught(fault, seed, planted):
    with planted(fault), pytest.raises((AssertionError, KeyError, InvalidInputError)):
        follow(World(seed), 1500)


@pytest.mark.mutant
@pytest.mark.parametrize("fault", ["event_gap_silent", "snapshot_forgets_one"])
def test_a_planted_fault_of_a_small_ring_is_caught(fault, seed, planted):
    with planted(fault), pytest.raises((AssertionError, KeyError)):
        follow(World(seed, event_buffer_size=2), 600)
