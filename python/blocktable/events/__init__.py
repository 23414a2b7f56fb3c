"""KV events for routers: what the prefix cache gains and loses, published in vLLM's wire format.

Before: the core records events (`Scheduler(event_buffer_size=...)`). After: any consumer of vLLM's events listens.
`KVEventsConfig` and `read_records` work with what the core needs; `KVEventPublisher` needs the extra `events`.
"""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from ..errors import MissingExtraError
from .config import KVEventsConfig
from .records import Cleared, Records, Removed, Stored, read_records

if TYPE_CHECKING:
    from .publisher import KVEventPublisher

__all__ = ["Cleared", "KVEventPublisher", "KVEventsConfig", "Records", "Removed", "Stored", "read_records"]


def __getattr__(name: str) -> Any:
    if name != "KVEventPublisher":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    for module, package in (("zmq", "pyzmq"), ("msgspec", "msgspec")):
        if find_spec(module) is None:
            raise MissingExtraError("blocktable.events.KVEventPublisher", "events", package)
    return import_module(".publisher", __name__).KVEventPublisher
