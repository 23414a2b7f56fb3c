"""Consumers of KV events as routers have them: an index rebuilt from batches, and one that hears them and asks for replay.

Before: messages of a `KVEventPublisher`. After: a set of (group, block hash), and an `AssertionError` at the first event that
does not follow from those before. They know the wire format and nothing of blocktable.
"""

import time
from collections.abc import Iterator
from typing import Any

import msgspec
import zmq

END = 2**64 - 1


class Index:
    """What a router knows of one engine."""

    def __init__(self) -> None:
        self.blocks: set[tuple[int, Any]] = set()
        self.next = 0
        self.clears = 0

    def apply(self, number: int, payload: bytes) -> None:
        assert number == self.next, f"batch {number} comes, {self.next} is due"
        self.next += 1
        ts, events, rank = msgspec.msgpack.decode(payload)
        assert ts > 1e9
        assert rank == 0
        for event in events:
            self._take(event)

    def _take(self, event: dict[str, Any]) -> None:
        kind = event["type"]
        if kind == "AllBlocksCleared":
            self.blocks.clear()
            self.clears += 1
            return
        names = {(event["group_idx"], name) for name in event["block_hashes"]}
        assert len(names) == len(event["block_hashes"])
        if kind == "BlockStored":
            assert len(event["token_ids"]) == event["block_size"] * len(names)
            assert not names & self.blocks, "stored twice"
            self.blocks |= names
        else:
            assert kind == "BlockRemoved"
            assert names <= self.blocks, "removed without having been stored"
            self.blocks -= names


class Listener:
    """Hears batches from the moment at which it connects; asks for those that it missed."""

    def __init__(self, endpoint: str, replay_endpoint: str | None = None) -> None:
        context = zmq.Context.instance()
        self.index = Index()
        self.topics: set[bytes] = set()
        self._sub = context.socket(zmq.SUB)
        self._sub.set(zmq.SUBSCRIBE, b"")
        self._sub.connect(endpoint)
        self._replay = None
        if replay_endpoint is not None:
            self._replay = context.socket(zmq.DEALER)
            self._replay.connect(replay_endpoint)

    def wait_for(self, batches: int, timeout_s: float = 20.0) -> None:
        """Hear until that many batches are applied."""
        until = time.monotonic() + timeout_s
        while self.index.next < batches:
            assert time.monotonic() < until, f"{self.index.next} of {batches} batches came"
            if not self._sub.poll(100):
                if self.index.next < batches:
                    self.catch_up()
                continue
            topic, number, payload = self._sub.recv_multipart()
            self.topics.add(topic)
            due = int.from_bytes(number, "big")
            if due > self.index.next:
                self.catch_up()
            elif due == self.index.next:
                self.index.apply(due, payload)

    def catch_up(self) -> None:
        """Apply what was missed, as far as it is known by now."""
        for number, payload in self.replay(self.index.next):
            if number >= self.index.next:
                self.index.apply(number, payload)

    def replay(self, first: int) -> Iterator[tuple[int, bytes]]:
        """The batches from `first` on that are still kept."""
        if self._replay is None:
            return
        self._replay.send_multipart([b"", first.to_bytes(8, "big")])
        while True:
            assert self._replay.poll(20_000), "the replay does not end"
            empty, topic, number, payload = self._replay.recv_multipart()
            assert empty == b""
            if int.from_bytes(number, "big") == END:
                assert (topic, payload) == (b"", b"")
                return
            self.topics.add(topic)
            yield int.from_bytes(number, "big"), payload

    def close(self) -> None:
        self._sub.close(linger=0)
        if self._replay is not None:
            self._replay.close(linger=0)
