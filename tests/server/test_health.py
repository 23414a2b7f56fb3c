"""Promise: health says whether requests are taken in and whether steps are made, whatever the engine does; it never waits."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest
from starlette.applications import Starlette

from blocktable.server import health
from blocktable.server.engine_client import EngineState, Progress

STALL_S = 5.0


class Told:
    """An engine that is only looked at."""

    def __init__(self, state: EngineState, *, still_s: float = 0.0, heard_s: float = 0.1, num_running: int = 0) -> None:
        self.state = state
        self.progress = Progress(num_running=num_running, num_waiting=0, num_steps=7, still_s=still_s, heard_s=heard_s)


READY = Told(EngineState.READY)
BUSY = Told(EngineState.READY, num_running=3, still_s=0.2)
HUNG = Told(EngineState.READY, num_running=3, still_s=9.0)
STOPPED = Told(EngineState.READY, heard_s=9.0)
STARTING = Told(EngineState.STARTING, heard_s=30.0)
DRAINING = Told(EngineState.DRAINING, num_running=1, still_s=0.1)
DEAD = Told(EngineState.DEAD)

TABLE = [
    # engine, /livez, /readyz, /healthz/progress, /health
    ("ready", READY, 200, 200, 200, 200),
    ("busy", BUSY, 200, 200, 200, 200),
    ("hung", HUNG, 200, 200, 503, 503),
    ("stopped", STOPPED, 200, 200, 503, 503),
    ("starting", STARTING, 200, 503, 200, 503),
    ("draining", DRAINING, 200, 503, 200, 200),
    ("dead", DEAD, 200, 503, 503, 503),
]


def ask(engine: Any, *paths: str) -> list[httpx.Response]:
    app = Starlette(routes=list(health.health_routes(engine, stall_s=STALL_S)))

    async def main() -> list[httpx.Response]:
        transport = httpx.ASGITransport(app=app)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            return [await client.get(path) for path in paths]

    return asyncio.run(main())


@pytest.mark.parametrize("row", TABLE, ids=lambda row: row[0])
def test_what_each_route_says(row: Any) -> None:
    _, engine, *expected = row
    answers = ask(engine, "/livez", "/readyz", "/healthz/progress", "/health")
    assert [answer.status_code for answer in answers] == expected
    assert ask(engine, "/ping")[0].status_code == expected[3]
    for answer in answers[1:]:
        told = answer.json()
        assert told["state"] == engine.state.value
        assert (told["num_running"], told["num_steps"]) == (engine.progress.num_running, 7)
        assert ("retry-after" in answer.headers) == (answer.status_code == 503)


@pytest.mark.parametrize("name", ["hung", "stopped", "dead"])
def test_a_health_that_only_looks_at_the_socket_is_caught(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The table can fail: 200 while nothing moves, as engines in the field said for 85 minutes."""
    monkeypatch.setattr(health, "is_moving", lambda client, stall_s: True)
    [row] = [row for row in TABLE if row[0] == name]
    with pytest.raises(AssertionError):
        test_what_each_route_says(row)
