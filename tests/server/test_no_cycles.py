"""Promise: what a request made goes with it. Full collections are rare in a serving process: what is in a cycle would lie about
for hours. Each planted fault is caught."""

from __future__ import annotations

import asyncio
import gc
import http.client
import json
import time
from collections import Counter
from typing import Any
from urllib.parse import urlsplit

import pytest

from blocktable.server import endpoint
from blocktable.server.generation import Generation
from blocktable.server.sse import Events

from .live import Live

NUM_REQUESTS = 5

MADE_BY_REQUESTS = (asyncio.Task, Events, Generation)


def ask(server: Live, body: dict[str, Any], *, leaves: bool = False) -> None:
    """One request on a connection of its own, read to its end or left after the first bytes."""
    there = urlsplit(server.url)
    connection = http.client.HTTPConnection(there.hostname or "", there.port, timeout=60)
    connection.request("POST", "/v1/completions", json.dumps(body), {"content-type": "application/json"})
    answer = connection.getresponse()
    if leaves:
        answer.read(20)
    else:
        answer.read()
    connection.close()


def check(server: Live) -> None:
    """Requests of every kind, and then a full collection, which finds nothing of theirs."""
    body = {"prompt": [1, 2, 3], "max_tokens": 30, "temperature": 0}
    gc.collect()
    gc.disable()
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        for _ in range(NUM_REQUESTS):
            ask(server, body)
            ask(server, body | {"stream": True})
            ask(server, body | {"stream": True}, leaves=True)
            ask(server, body | {"n": -1})
        time.sleep(0.5)  # the last one has left
        gc.collect()
        found = Counter(type(one).__name__ for one in gc.garbage if isinstance(one, MADE_BY_REQUESTS))
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()
    assert not found, f"{4 * NUM_REQUESTS} requests left {dict(found)}"


def test_no_request_leaves_a_cycle(server: Live) -> None:
    check(server)


async def _end_and_keep(watch: Any) -> None:
    if watch._task is not None:
        watch._task.cancel()
        await asyncio.wait((watch._task,))


def _keeps_its_method(events: Any, *arguments: Any, **options: Any) -> None:
    _init(events, *arguments, **options)
    events.own = events._write


_init = Events.__init__

FAULTS = {
    "a watch keeps what it has": (endpoint._Watch, "end", _end_and_keep),
    "a stream keeps a method of its own": (Events, "__init__", _keeps_its_method),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_caught(fault: str, server: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    where, name, planted = FAULTS[fault]
    monkeypatch.setattr(where, name, planted)
    with pytest.raises(AssertionError):
        check(server)
