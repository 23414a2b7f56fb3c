"""Publishes KV events over ZeroMQ as vLLM does, from a thread of its own.

Before: the engine calls `drain` after each step: one call into the core, one entry in a queue. After: the thread encodes,
sends, and answers who asks for batches that it missed. Always: `drain` never waits and never raises; batches are numbered
from 0 without a gap; a consumer that applies them in order has the index. When events were lost in the core's ring, a
snapshot is published instead: everything is cleared, then each key is stored.

Frames: topic, number of the batch (8 bytes, big-endian), payload. A replay request is an empty frame and the first wanted
number (8 bytes, big-endian); each answer has the frames of the message it repeats behind an empty one; the last has number -1
and no payload.
"""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from types import TracebackType
from typing import Any, NamedTuple, Protocol, Self

import zmq

from ..errors import EndpointError, InvalidInputError
from .config import KVEventsConfig, is_bound, offset_endpoint
from .records import read_header, read_records
from .wire import Wire

logger = logging.getLogger("blocktable.events")

END_OF_REPLAY = (-1).to_bytes(8, "big", signed=True)
SNAPSHOT_BATCH = 4096
"""Events of a snapshot in one message."""


class EventSource(Protocol):
    """What `Scheduler` offers to readers of events."""

    def read_events(self, since: int) -> bytes | None:
        """The events from this number on."""

    def event_snapshot(self) -> bytes | None:
        """All that is published, as events."""


class _Waiting(NamedTuple):
    """Bytes of the core on their way to the thread."""

    ts: float
    data: bytes
    is_snapshot: bool


class KVEventPublisher:
    """The events of one scheduler, for any number of consumers. Raises `EndpointError` if an address cannot be had.

    `windows`: what the scheduler's `config["groups"]` says, so that consumers are told the kind of each group.
    """

    def __init__(self, config: KVEventsConfig, *, data_parallel_rank: int = 0, windows: Sequence[int | None] = ()) -> None:
        if not 0 <= data_parallel_rank < 65536:
            raise InvalidInputError("data_parallel_rank", data_parallel_rank, "must be 0..=65535")
        self._config = config
        self._topic = config.topic.encode()
        self._wire = Wire(
            data_parallel_rank=data_parallel_rank,
            medium=config.medium,
            use_int_block_hashes=config.use_int_block_hashes,
            windows=windows,
        )
        self._next_event = 0
        self._wants_snapshot = False
        self._queue: deque[_Waiting] = deque()
        self._next_batch = 0
        self._replayable: deque[tuple[bytes, bytes]] = deque(maxlen=config.buffer_steps)
        self._last_snapshot = -1  # number of its first batch
        self._is_closing = False
        self._has_failed = False
        self._turn = threading.Lock()
        self._open(data_parallel_rank)
        self._thread = threading.Thread(target=self._run, name="blocktable-kv-events", daemon=True)
        self._thread.start()

    @property
    def endpoint(self) -> str:
        """Where events are published; what was left to the system is filled in."""
        return self._endpoint

    @property
    def replay_endpoint(self) -> str | None:
        """Where missed batches are asked for."""
        return self._replay_endpoint

    @property
    def num_batches(self) -> int:
        """Batches published so far; the next one has this number."""
        return self._next_batch

    @property
    def is_running(self) -> bool:
        """Whether what is drained will be published."""
        return not self._is_closing and not self._has_failed

    def drain(self, source: EventSource) -> None:
        """Take what happened since the last call. Called after each step, by one thread at a time; never waits, never raises.

        All calls must name the same source.
        """
        if self._is_closing or self._has_failed or len(self._queue) >= self._config.max_queue_size:
            # What is not taken stays in the ring of the core.
            return
        try:
            with self._turn:
                self._take(source)
        except Exception:
            self._has_failed = True
            logger.exception("KV events end here: they could not be read")

    def request_snapshot(self) -> None:
        """Let the next `drain` publish everything anew."""
        self._wants_snapshot = True

    def close(self, timeout_s: float = 1.0) -> None:
        """Publish what waits, for `timeout_s` at most, and let go of the addresses. The second time it does nothing."""
        if self._is_closing:
            return
        self._is_closing = True
        self._wake()
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            logger.warning("%d batches of KV events were not published within %s s", len(self._queue), timeout_s)
            self._queue.clear()
            self._wake()
            self._thread.join(timeout_s)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def _take(self, source: EventSource) -> None:
        wants_snapshot, self._wants_snapshot = self._wants_snapshot, False
        data = source.read_events(self._next_event)
        if data is not None:
            self._next_event, lost = read_header(data)
            if lost:
                logger.warning("%d KV events were lost between two steps: a snapshot is published", lost)
                wants_snapshot = True
        if wants_snapshot:
            data = source.event_snapshot()
            if data is not None:
                self._next_event, _ = read_header(data)
        if data is not None:
            self._queue.append(_Waiting(time.time(), data, wants_snapshot))
            self._wake()

    def _wake(self) -> None:
        # As many wake-ups wait as fit, or the thread has ended.
        with suppress(OSError):
            self._waker.send(b"\0")

    # Everything below runs on the thread, but for `_open`.

    def _open(self, rank: int) -> None:
        config = self._config
        self._endpoint = offset_endpoint(config.endpoint, rank)
        self._replay_endpoint = None if config.replay_endpoint is None else offset_endpoint(config.replay_endpoint, rank)
        # Only within one context can `inproc` ends meet; one of our own can be ended, so that addresses are free after `close`.
        is_shared = any(end is not None and end.startswith("inproc://") for end in (self._endpoint, self._replay_endpoint))
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context.instance() if is_shared else zmq.Context()
        self._context = None if is_shared else context
        self._pub = context.socket(zmq.PUB)
        self._replay = None
        try:
            self._pub.set_hwm(config.hwm)
            self._endpoint = _attach(self._pub, self._endpoint, bind=is_bound(self._endpoint))
            if self._replay_endpoint is not None:
                self._replay = context.socket(zmq.ROUTER)
                # A replay is as long as the buffer: nothing of it may be dropped.
                self._replay.set(zmq.SNDHWM, 0)
                self._replay_endpoint = _attach(self._replay, self._replay_endpoint, bind=True)
        except EndpointError:
            self._close_sockets(linger_ms=0)
            raise
        self._sleeper, self._waker = socket.socketpair()
        self._sleeper.settimeout(0)
        self._waker.settimeout(0)

    def _run(self) -> None:
        try:
            poller = zmq.Poller()
            poller.register(self._sleeper, zmq.POLLIN)
            if self._replay is not None:
                poller.register(self._replay, zmq.POLLIN)
            while not self._is_closing or self._queue:
                if not self._queue:
                    poller.poll()
                self._clear_wakes()
                waiting = self._pop()
                if waiting is not None:
                    self._publish(waiting)
                if self._replay is not None and self._replay.poll(0):
                    self._answer(self._replay.recv_multipart(), self._replay)
        except Exception:
            logger.exception("KV events end here: they could not be published")
            self._has_failed = True
        finally:
            self._close_sockets(linger_ms=1000)
            self._sleeper.close()
            self._waker.close()

    def _pop(self) -> _Waiting | None:
        try:
            return self._queue.popleft()
        except IndexError:
            return None

    def _clear_wakes(self) -> None:
        with suppress(BlockingIOError):
            while self._sleeper.recv(4096):
                pass

    def _publish(self, waiting: _Waiting) -> None:
        records = read_records(waiting.data)
        events = records.events
        size = SNAPSHOT_BATCH if waiting.is_snapshot else max(len(events), 1)
        for at in range(0, len(events), size):
            payload = self._wire.encode(waiting.ts, events[at : at + size], records.block_size)
            number = self._next_batch.to_bytes(8, "big")
            self._pub.send_multipart((self._topic, number, payload))
            self._replayable.append((number, payload))
            if waiting.is_snapshot and at == 0:
                self._last_snapshot = self._next_batch
            self._next_batch += 1

    def _answer(self, frames: list[bytes], replay: zmq.Socket[bytes]) -> None:
        """Repeat the batches from the wanted number on. If some are gone, begin with the last snapshot, or promise one."""
        if len(frames) != 3 or len(frames[2]) != 8:
            logger.warning("a replay request of %d frames is not understood", len(frames))
            return
        client, _, wanted = frames
        first = int.from_bytes(wanted, "big")
        oldest = self._next_batch - len(self._replayable)
        if first < oldest:
            if self._last_snapshot >= oldest:
                first = self._last_snapshot
            else:
                self._wants_snapshot = True
        for number, payload in list(self._replayable)[max(first - oldest, 0) :]:
            replay.send_multipart((client, b"", self._topic, number, payload))
        replay.send_multipart((client, b"", b"", END_OF_REPLAY, b""))

    def _close_sockets(self, *, linger_ms: int) -> None:
        self._pub.close(linger=linger_ms)
        if self._replay is not None:
            self._replay.close(linger=linger_ms)
        if self._context is not None:
            self._context.term()


def _attach(end: zmq.Socket[Any], endpoint: str, *, bind: bool) -> str:
    """Bind or connect; the address with what the system filled in."""
    try:
        if bind:
            end.bind(endpoint)
            return end.get_string(zmq.LAST_ENDPOINT)
        end.connect(endpoint)
    except zmq.ZMQError as error:
        raise EndpointError(endpoint, str(error.strerror or error)) from None
    return endpoint
