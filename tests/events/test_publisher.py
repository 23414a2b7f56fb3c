"""Promise: consumers hear every batch, late ones catch up by replay, and nothing that happens to the publisher stops a step."""

import logging
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import zmq

from blocktable import EndpointError, InvalidInputError, UnknownOptionError
from blocktable.events import KVEventPublisher, KVEventsConfig
from blocktable.events.config import is_bound, offset_endpoint
from blocktable.events.wire import short_hash

from .conftest import World
from .listener import Listener

MakeListener = Callable[..., Listener]
MakePublisher = Callable[..., KVEventPublisher]


@pytest.fixture
def make_publisher() -> Iterator[MakePublisher]:
    """Publishers on ports that the system chooses, all closed at the end; keywords change their configuration."""
    made: list[KVEventPublisher] = []

    def make(**changes: Any) -> KVEventPublisher:
        ports = {"endpoint": "tcp://127.0.0.1:*", "replay_endpoint": "tcp://127.0.0.1:*"}
        made.append(KVEventPublisher(KVEventsConfig(**({"enable_kv_cache_events": True} | ports | changes))))
        return made[-1]

    yield make
    for publisher in made:
        publisher.close()


def run(world: World, publisher: KVEventPublisher, steps: int) -> None:
    for _ in range(steps):
        world.happen()
        publisher.drain(world.scheduler)


def settle(publisher: KVEventPublisher) -> int:
    """Wait until all that was drained is published; the number of batches."""
    tick = threading.Event()
    for _ in range(2000):
        if not publisher._queue:
            tick.wait(0.02)
            if not publisher._queue:
                return publisher.num_batches
        tick.wait(0.005)
    raise AssertionError("the publisher does not publish")


def names(world: World) -> set[tuple[int, int]]:
    return {(group, short_hash(key)) for group, key in world.published()}


def test_a_consumer_has_the_index(world, make_publisher, make_listener):
    publisher = make_publisher(topic="kv")
    listener = make_listener(publisher.endpoint, publisher.replay_endpoint)
    for _ in range(5):
        run(world, publisher, 60)
        listener.wait_for(settle(publisher))
        assert listener.index.blocks == names(world)
    assert listener.topics == {b"kv"}
    assert publisher.num_batches > 50


def test_a_late_consumer_catches_up_by_replay(world, make_publisher, make_listener):
    publisher = make_publisher()
    run(world, publisher, 200)
    batches = settle(publisher)
    listener = make_listener(publisher.endpoint, publisher.replay_endpoint)
    listener.wait_for(batches)
    assert listener.index.blocks == names(world)
    run(world, publisher, 50)
    listener.wait_for(settle(publisher))
    assert listener.index.blocks == names(world)


def test_a_replay_begins_where_it_was_asked_to_and_ends_with_minus_one(world, make_publisher, make_listener):
    publisher = make_publisher()
    run(world, publisher, 100)
    batches = settle(publisher)
    listener = make_listener(publisher.endpoint, publisher.replay_endpoint)
    assert [number for number, _ in listener.replay(batches - 3)] == [batches - 3, batches - 2, batches - 1]
    assert [number for number, _ in listener.replay(batches)] == []
    assert [number for number, _ in listener.replay(2**63)] == []
    assert [number for number, _ in listener.replay(0)] == list(range(batches))


def test_who_asks_for_more_than_is_kept_gets_a_snapshot(world, make_publisher, make_listener):
    publisher = make_publisher(buffer_steps=20)
    run(world, publisher, 200)
    batches = settle(publisher)
    listener = make_listener(publisher.endpoint, publisher.replay_endpoint)
    assert [number for number, _ in listener.replay(0)] == list(range(batches - 20, batches)), "all that is kept"
    run(world, publisher, 10)
    after = settle(publisher)
    kept = list(listener.replay(0))
    assert batches <= kept[0][0] < after, "the replay begins with the snapshot"
    listener.index.next = kept[0][0]
    for number, payload in kept:
        listener.index.apply(number, payload)
    assert listener.index.clears >= 1
    assert listener.index.blocks == names(world)


def test_a_ring_that_overflowed_is_followed_by_a_snapshot(seed, make_publisher, make_listener, caplog):
    world, publisher = World(seed, event_buffer_size=4), make_publisher()
    with caplog.at_level(logging.WARNING):
        for _ in range(40):
            for _ in range(20):
                world.happen()
            publisher.drain(world.scheduler)
    assert "snapshot" in caplog.text
    listener = make_listener(publisher.endpoint, publisher.replay_endpoint)
    listener.wait_for(settle(publisher))
    assert listener.index.blocks == names(world)
    assert listener.index.clears > 10


def test_a_large_snapshot_comes_in_parts(world, make_publisher, make_listener, monkeypatch):
    monkeypatch.setattr("blocktable.events.publisher.SNAPSHOT_BATCH", 3)
    publisher = make_publisher()
    run(world, publisher, 100)
    before = settle(publisher)
    publisher.request_snapshot()
    publisher.drain(world.scheduler)
    parts = settle(publisher) - before
    assert parts == -(-(1 + len(world.published())) // 3) > 1
    listener = make_listener(publisher.endpoint, publisher.replay_endpoint)
    listener.wait_for(before + parts)
    assert listener.index.blocks == names(world)


def test_a_full_queue_leaves_the_events_in_the_core(world, make_publisher, make_listener, monkeypatch):
    publisher = make_publisher(max_queue_size=2)
    may_go_on = threading.Event()
    publish = publisher._publish
    monkeypatch.setattr(publisher, "_publish", lambda waiting: (may_go_on.wait(20), publish(waiting)))
    run(world, publisher, 120)
    assert len(publisher._queue) == 2, "drain came back at once, whatever the thread does"
    may_go_on.set()
    settle(publisher)
    publisher.drain(world.scheduler)
    listener = make_listener(publisher.endpoint, publisher.replay_endpoint)
    listener.wait_for(settle(publisher))
    assert listener.index.blocks == names(world)


@pytest.mark.parametrize("where", ["read", "send"])
def test_what_breaks_in_the_publisher_stops_no_step(where, world, make_publisher, monkeypatch, caplog):
    publisher = make_publisher()

    def explode(*_: object) -> Any:
        raise RuntimeError("planted")

    class Broken:
        read_events = event_snapshot = explode

    if where == "send":
        monkeypatch.setattr(publisher, "_publish", explode)
    for _ in range(50):
        world.happen()
        publisher.drain(Broken() if where == "read" else world.scheduler)
    publisher._thread.join(5 if where == "send" else 0)
    assert not publisher.is_running
    assert "KV events end here" in caplog.text
    world.scheduler.audit()


def test_nonsense_on_the_replay_address_is_passed_over(world, make_publisher, make_listener):
    publisher = make_publisher()
    stranger = zmq.Context.instance().socket(zmq.DEALER)
    stranger.connect(publisher.replay_endpoint)
    try:
        for frames in ([b"x"], [b"", b"short"], [b"", b"1234567", b"12345678", b""], [b""] * 9):
            stranger.send_multipart(frames)
        run(world, publisher, 50)
        listener = make_listener(publisher.endpoint, publisher.replay_endpoint)
        listener.wait_for(settle(publisher))
        assert listener.index.blocks == names(world)
    finally:
        stranger.close(linger=0)


def test_close_publishes_what_waits_and_gives_the_address_back(world, make_publisher, make_listener):
    publisher = make_publisher()
    listener = make_listener(publisher.endpoint)
    run(world, publisher, 5)
    listener.wait_for(0)
    run(world, publisher, 50)
    endpoint = publisher.endpoint
    publisher.close()
    publisher.close()
    publisher.drain(world.scheduler)
    assert not publisher._queue
    assert not publisher._thread.is_alive()
    make_publisher(endpoint=endpoint.replace("127.0.0.1", "*")).close()


def test_ends_in_one_process_meet(world, make_publisher, make_listener):
    publisher = make_publisher(endpoint="inproc://kv-events", replay_endpoint="inproc://kv-replay")
    run(world, publisher, 60)
    listener = make_listener(publisher.endpoint, publisher.replay_endpoint)
    listener.wait_for(settle(publisher))
    assert listener.index.blocks == names(world)


def test_an_address_that_is_taken_is_refused_by_name(make_publisher):
    first = make_publisher()
    with pytest.raises(EndpointError) as refused:
        make_publisher(replay_endpoint=first.replay_endpoint)
    assert refused.value.endpoint == first.replay_endpoint
    assert isinstance(refused.value, OSError)
    port = first.endpoint.rpartition(":")[2]
    with pytest.raises(EndpointError, match=port):
        make_publisher(endpoint=f"tcp://*:{port}")


@pytest.mark.parametrize(
    "field, value",
    [
        ("endpoint", "5557"),
        ("endpoint", "tcp://host"),
        ("replay_endpoint", "udp://*:1"),
        ("publisher", "kafka"),
        ("buffer_steps", -1),
        ("hwm", 1.5),
        ("max_queue_size", 0),
        ("max_queue_size", True),
        ("event_buffer_size", 0),
        ("topic", b"kv"),
        ("medium", None),
        ("enable_kv_cache_events", "yes"),
        ("use_int_block_hashes", 1),
    ],
)
def test_a_bad_value_is_refused_by_its_field(field, value):
    with pytest.raises(InvalidInputError) as refused:
        KVEventsConfig.from_options({"enable_kv_cache_events": True, field: value})
    assert refused.value.field == field


def test_a_misspelt_field_is_refused_with_the_nearest():
    with pytest.raises(UnknownOptionError, match="endpoint"):
        KVEventsConfig.from_options({"end_point": "tcp://*:1"})
    with pytest.raises(InvalidInputError, match="kv_events_config"):
        KVEventsConfig.from_options("zmq")


def test_the_defaults_are_vllms():
    silent, enabled = KVEventsConfig(), KVEventsConfig(enable_kv_cache_events=True)
    assert (silent.publisher, silent.records, silent.publishes) == ("null", 0, False)
    assert (enabled.publisher, enabled.endpoint, enabled.replay_endpoint, enabled.publishes) == (
        "zmq",
        "tcp://*:5557",
        None,
        True,
    )
    assert (enabled.buffer_steps, enabled.hwm, enabled.max_queue_size, enabled.topic) == (10_000, 100_000, 100_000, "")


def test_each_rank_has_its_endpoint():
    assert offset_endpoint("tcp://*:5557", 0) == "tcp://*:5557"
    assert offset_endpoint("tcp://*:5557", 3) == "tcp://*:5560"
    assert offset_endpoint("tcp://*:0", 3) == "tcp://*:0"
    assert offset_endpoint("inproc://a", 2) == "inproc://a_dp2"
    assert [is_bound(endpoint) for endpoint in ("tcp://*:1", "ipc://a", "tcp://[::]:1", "tcp://router:1")] == [
        True,
        True,
        True,
        False,
    ]


class SkipsANumber(KVEventPublisher):
    """Numbers of batches have a hole."""

    def _publish(self, waiting: Any) -> None:
        super()._publish(waiting)
        self._next_batch += int(self._next_batch == 7)


class ForgetsToReplay(KVEventPublisher):
    """The newest batch is missing from a replay."""

    def _answer(self, frames: Any, replay: Any) -> None:
        newest = self._replayable.pop()
        super()._answer(frames, replay)
        self._replayable.append(newest)


class LosesTheRestOfASnapshot(KVEventPublisher):
    """Says that everything is cleared, and no more."""

    def _publish(self, waiting: Any) -> None:
        if waiting.is_snapshot:
            data = bytearray(waiting.data[:24] + b"\3\0\0\0")
            data[16:20] = (1).to_bytes(4, "little")
            waiting = waiting._replace(data=bytes(data))
        super()._publish(waiting)


@pytest.mark.parametrize("fault", [SkipsANumber, ForgetsToReplay, LosesTheRestOfASnapshot])
def test_a_planted_fault_is_caught(fault, world, make_listener):
    config = KVEventsConfig(enable_kv_cache_events=True, endpoint="tcp://127.0.0.1:*", replay_endpoint="tcp://127.0.0.1:*")
    with fault(config) as publisher:
        run(world, publisher, 100)
        publisher.request_snapshot()
        run(world, publisher, 1)
        batches = settle(publisher)
        listener = make_listener(publisher.endpoint, publisher.replay_endpoint)
        with pytest.raises(AssertionError):
            hear(listener, batches, names(world))


def hear(listener: Listener, batches: int, published: set[tuple[int, int]]) -> None:
    listener.wait_for(batches, timeout_s=0.5)
    assert listener.index.blocks == published
