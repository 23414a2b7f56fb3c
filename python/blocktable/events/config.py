"""How KV events are published: one frozen record with vLLM's names, checked once.

Before: `LLM(kv_events_config=...)` or the user of a `KVEventPublisher`. After: `publisher.py` binds what it names.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from .. import checks
from ..errors import InvalidInputError, UnknownOptionError

PUBLISHERS = ("null", "zmq")
_ENDPOINT = re.compile(r"(tcp://.+:(\d{1,5}|\*)|ipc://.+|inproc://.+)")


@dataclass(frozen=True, slots=True, kw_only=True)
class KVEventsConfig:
    """What is published, and where. Raises `InvalidInputError` (field, value, bound) on a value outside its bound."""

    enable_kv_cache_events: bool = False
    """Record events at all."""
    publisher: str | None = None
    """`zmq`; or `null`: recorded only, for whoever calls `Scheduler.read_events`. None = `zmq` if events are recorded."""
    endpoint: str = "tcp://*:5557"
    """Where events are published. An address with `*` or `::`, `ipc://` or `inproc://` is bound, any other is connected to."""
    replay_endpoint: str | None = None
    """Where missed batches are asked for; always bound. None = nowhere."""
    buffer_steps: int = 10_000
    """Batches that are kept for replay."""
    hwm: int = 100_000
    """Messages that wait for one slow consumer; after that it loses some."""
    max_queue_size: int = 100_000
    """Batches that wait to be published. When as many wait, events stay in the core's ring."""
    topic: str = ""
    """First frame of every message."""
    event_buffer_size: int = 65_536
    """Events that the core's ring holds between two steps. If more happen, a snapshot is published instead."""
    use_int_block_hashes: bool = True
    """Name blocks by the last 64 bits of their keys, as a number; False = by whole keys, 32 bytes."""
    medium: str = "GPU"
    """What consumers call the first tier, on any device."""

    def __post_init__(self) -> None:
        for field in ("enable_kv_cache_events", "use_int_block_hashes"):
            if not isinstance(getattr(self, field), bool):
                raise InvalidInputError(field, getattr(self, field), "must be True or False")
        if self.publisher is None:
            object.__setattr__(self, "publisher", "zmq" if self.enable_kv_cache_events else "null")
        checks.one_of("publisher", self.publisher, PUBLISHERS)
        _need_endpoint("endpoint", self.endpoint)
        if self.replay_endpoint is not None:
            _need_endpoint("replay_endpoint", self.replay_endpoint)
        for field, low, high in (
            ("buffer_steps", 0, 2**31 - 1),
            ("hwm", 0, 2**31 - 1),
            ("max_queue_size", 1, 2**31 - 1),
            ("event_buffer_size", 1, 2**24),
        ):
            checks.whole(field, getattr(self, field), low, high)
        for field in ("topic", "medium"):
            if not isinstance(getattr(self, field), str):
                raise InvalidInputError(field, getattr(self, field), "must be a text")

    @classmethod
    def from_options(cls, options: Any) -> KVEventsConfig:
        """The record of these options. Raises `UnknownOptionError` naming the nearest, and `InvalidInputError`."""
        if isinstance(options, cls):
            return options
        if not isinstance(options, Mapping):
            raise InvalidInputError("kv_events_config", options, "must be a KVEventsConfig or a mapping of its fields")
        known = {field.name for field in fields(cls)}
        for name, value in options.items():
            if name not in known:
                raise UnknownOptionError(str(name), value, known)
        return cls(**options)

    @property
    def records(self) -> int:
        """`event_buffer_size` of the scheduler: 0 if nothing is recorded."""
        return self.event_buffer_size if self.enable_kv_cache_events else 0

    @property
    def publishes(self) -> bool:
        """Whether there is something to bind."""
        return self.enable_kv_cache_events and self.publisher == "zmq"


def offset_endpoint(endpoint: str, rank: int) -> str:
    """The endpoint of a data-parallel rank: the port that many higher, or a suffix. Port 0 or `*` is left to the system."""
    if rank == 0 or endpoint.startswith("ipc://"):
        return endpoint if rank == 0 else f"{endpoint}_dp{rank}"
    if endpoint.startswith("inproc://"):
        return f"{endpoint}_dp{rank}"
    address, _, port = endpoint.rpartition(":")
    return endpoint if port in ("0", "*") else f"{address}:{int(port) + rank}"


def is_bound(endpoint: str) -> bool:
    """Whether an endpoint is bound; otherwise it is connected to."""
    return "*" in endpoint or "::" in endpoint or endpoint.startswith(("ipc://", "inproc://"))


def _need_endpoint(field: str, value: Any) -> None:
    if not isinstance(value, str) or not _ENDPOINT.fullmatch(value):
        raise InvalidInputError(field, value, "must be tcp://HOST:PORT, ipc://PATH or inproc://NAME")
