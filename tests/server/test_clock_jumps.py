"""Promise: when the machine's clock is set, by years and in either direction, nothing but the times that are told changes:
deadlines, patience, figures and answers go by a clock that only goes on."""

import json
import logging
import random
import re
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from blocktable import AsyncLLM
from blocktable.server import request_watch
from blocktable.server.in_process import InProcessEngine
from blocktable.server.limits import Limits
from blocktable.server.logs import JsonFormatter
from blocktable.server.request_watch import WatchedClient
from tests.engine.ways import check_empty

from .conftest import MakeServer
from .live import events

PACKAGE = Path(request_watch.__file__).parents[1]

YEARS_S = 50 * 365 * 24 * 3600

TELLS_THE_DATE = {
    "engine/crash_report.py": "the name of a file",
    "events/publisher.py": "the time in an event, as vLLM has it",
    "server/generation.py": "`created` of an answer",
    "server/serving.py": "`created` of a model",
    "server/snapshot.py": "when the engine started",
    "server/tracing.py": "times of spans, from those of the other clock",
}
"""Who may look at the clock that jumps, and for what."""


@pytest.fixture
def jumping(monkeypatch: pytest.MonkeyPatch, rng: random.Random) -> Callable[[], float]:
    """The machine's clock is set before each look at it. The logs go by it too."""
    right = time.time

    def jumps() -> float:
        return right() + rng.uniform(-YEARS_S, YEARS_S)

    monkeypatch.setattr(time, "time", jumps)
    monkeypatch.setattr(time, "time_ns", lambda: int(jumps() * 1e9))
    return jumps


def serve_meanwhile(engine: AsyncLLM, serve: MakeServer) -> None:
    """Streams and deadlines; then the books."""
    begun = time.monotonic()
    client = WatchedClient(InProcessEngine(engine))
    http = serve(client, limits=Limits(write_timeout_s=60, body_timeout_s=60)).client()
    ask = {"prompt": [5, 6, 7], "max_tokens": 30, "temperature": 0, "ignore_eos": True}
    whole = http.post("/v1/completions", json=ask).json()["choices"][0]["text"]
    for _ in range(10):
        told = events(http.post("/v1/completions", json=ask | {"stream": True}).text)[:-1]
        assert "".join(one["choices"][0]["text"] for one in told) == whole
    in_time = ask | {"queue_deadline_s": 60, "deadline_s": 60}
    assert http.post("/v1/completions", json=in_time).json()["choices"][0]["finish_reason"] == "length"
    too_late = http.post("/v1/completions", json=ask | {"max_tokens": 200, "deadline_s": 0.001}).json()
    assert too_late["choices"][0]["finish_reason"] == "abort"
    figures, most_s = client.figures, time.monotonic() - begun
    for one in (figures.whole_s, figures.first_token_s, figures.between_tokens_s, figures.queued_s, figures.decode_s):
        assert 0 <= one.sum <= most_s * max(1, one.count)
    assert figures.num_faults == 0
    assert 0 <= client.progress.still_s <= most_s
    check_empty(engine)


def test_requests_go_on_as_if_nothing_was(engine: AsyncLLM, serve: MakeServer, jumping: Callable[[], float]) -> None:
    serve_meanwhile(engine, serve)


def test_books_by_the_clock_that_jumps_are_caught(
    engine: AsyncLLM, serve: MakeServer, jumping: Callable[[], float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Planted: the times of requests are taken from it."""
    monkeypatch.setattr(request_watch, "time", SimpleNamespace(monotonic=jumping))
    with pytest.raises(AssertionError):
        serve_meanwhile(engine, serve)


def test_a_line_of_the_log_of_any_year_is_whole(jumping: Callable[[], float]) -> None:
    record = logging.LogRecord("a", logging.INFO, __file__, 1, "said", None, None)
    for created in (-3e9, 0.0, jumping(), 4e9):
        record.created = created
        assert json.loads(JsonFormatter().format(record))["time"].endswith("Z")


def test_nobody_else_looks_at_the_clock_that_jumps() -> None:
    looks = re.compile(r"\btime\.time(_ns)?\b|\bdatetime\b|from time import")
    found = {
        path.relative_to(PACKAGE).as_posix()
        for path in PACKAGE.rglob("*.py")
        if "bench" not in path.parts and looks.search(path.read_text(encoding="utf-8"))
    }
    assert found == set(TELLS_THE_DATE)
