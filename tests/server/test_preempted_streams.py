"""Promise: a stream whose request loses its blocks, at whichever token, goes on where it was, with the same text and counts."""

import json
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from blocktable import AsyncLLM
from blocktable.engine.output_rows import NO_OUTPUTS, OutputRows
from tests.engine.faults import faulty_model
from tests.engine.ways import check_empty

from .conftest import MakeServer
from .live import PATIENCE_S, Live

COMPLETIONS = "/v1/completions"
LENGTH = 40
ASK = {"prompt": [3] * 9, "temperature": 1, "seed": 7, "max_tokens": LENGTH, "ignore_eos": True}
INTRUDER = {"prompt": [5] * 80, "max_tokens": 1, "priority": -1000}
"""Takes ten of the eleven blocks, and goes before everybody, however old they are."""


class Crowded:
    """A server with room for one of both."""

    def __init__(self, server: Live, engine: AsyncLLM, monkeypatch: pytest.MonkeyPatch) -> None:
        self._server = server
        self._engine = engine
        self._steps_left = -1
        self._now, self._came = threading.Event(), threading.Event()
        thread: Any = engine._thread
        submit = thread.submit

        def heard(ticket: Any) -> None:
            submit(ticket)
            if self._now.is_set():
                self._came.set()

        monkeypatch.setattr(thread, "submit", heard)

    def run_model(self, plan: Any, forward: Callable[[], Any]) -> Any:
        """The step that computes the chosen token ends when the intruder waits."""
        self._steps_left -= 1
        if self._steps_left == 0:
            self._now.set()
            assert self._came.wait(PATIENCE_S)
        return forward()

    def streamed(self, disturb_at: int) -> tuple[str, int]:
        """(text, output tokens by its usage) of a stream; the intruder comes while that token is computed; 0: never."""
        text, usage = "", 0
        self._now.clear()
        self._came.clear()
        self._steps_left = disturb_at
        ask = ASK | {"stream": True, "stream_options": {"include_usage": True}}
        with ThreadPoolExecutor(1) as beside:
            intruder = beside.submit(self._intrude) if disturb_at else None
            with self._server.client().stream("POST", COMPLETIONS, json=ask) as stream:
                for line in stream.iter_lines():
                    if line.startswith("data: {"):
                        told = json.loads(line.removeprefix("data: "))
                        text += "".join(choice["text"] for choice in told["choices"])
                        usage = (told.get("usage") or {}).get("completion_tokens", usage)
            assert intruder is None or intruder.result() == 200
        return text, usage

    def _intrude(self) -> int:
        assert self._now.wait(PATIENCE_S)
        return self._server.client().post(COMPLETIONS, json=INTRUDER).status_code

    def check(self, places: range) -> None:
        cold = self.streamed(0)
        assert cold[1] == LENGTH
        for place in places:
            before = self._engine.scheduler.stats()["preemptions"]
            assert self.streamed(place) == cold, f"another text, disturbed at token {place}"
            assert self._engine.scheduler.stats()["preemptions"] == before + 1, f"not preempted at token {place}"
        check_empty(self._engine)


@pytest.fixture
def crowded(make_async: Callable[..., AsyncLLM], serve: MakeServer, monkeypatch: pytest.MonkeyPatch) -> Iterator[Crowded]:
    options: dict[str, Any] = {
        "policy": "priority",
        "preempt_for_waiting": True,
        "num_blocks": 12,
        "max_num_batched_tokens": 128,
    }
    engine = make_async(enable_prefix_caching=False, **options)
    one = Crowded(serve(engine), engine, monkeypatch)
    with faulty_model(engine, one.run_model):
        yield one


def test_a_stream_that_is_preempted_at_any_token_is_the_same(crowded: Crowded) -> None:
    crowded.check(range(1, LENGTH))


def test_a_stream_that_forgets_what_it_said_is_caught(crowded: Crowded, monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted: rows that forget what was made before a preemption."""
    real = OutputRows.open
    monkeypatch.setattr(OutputRows, "open", lambda self, row, saved: real(self, row, NO_OUTPUTS))
    with pytest.raises(AssertionError, match="another text"):
        crowded.check(range(20, 21))
