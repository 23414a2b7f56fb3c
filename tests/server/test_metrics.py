"""Promise: every series moves when what it tells of happens; names are vLLM's where they mean the same; no client makes them
grow."""

from __future__ import annotations

import asyncio
import json
import mmap
import os
import re
import signal
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from contextlib import aclosing
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from blocktable.errors import EngineDeadError
from blocktable.server import metrics as metrics_module
from blocktable.server.app import make_app
from blocktable.server.engine_client import EngineRequest, Piece, Times
from blocktable.server.metrics import SERIES, Metrics
from blocktable.server.refusals import Refusals
from blocktable.server.request_watch import MAX_TENANTS, RequestFigures, WatchedClient, WatchedRequest
from blocktable.server.serving import Serving
from blocktable.server.supervisor import Supervisor
from blocktable.server.tenants import Tenants

from .fake_engine import FakeEngine
from .processes import Launch, read, request

TIMES = Times(10.0, 12.0, 15.0, 20.0, [(16.0, 17.0)])

ROOT = Path(__file__).resolve().parents[2]

MOVED_BY = {
    # series: what moves it, see `Scenes`
    "vllm:num_requests_running": "crowd",
    "vllm:num_requests_waiting": "crowd",
    "vllm:kv_cache_usage_perc": "crowd",
    "vllm:prefix_cache_queries": "answers",
    "vllm:prefix_cache_hits": "answers",
    "vllm:num_preemptions": "crowd",
    "vllm:prompt_tokens": "answers",
    "vllm:generation_tokens": "answers",
    "vllm:request_success": "answers",
    "vllm:time_to_first_token_seconds": "answers",
    "vllm:inter_token_latency_seconds": "answers",
    "vllm:request_time_per_output_token_seconds": "answers",
    "vllm:e2e_request_latency_seconds": "answers",
    "vllm:request_prompt_tokens": "answers",
    "vllm:request_generation_tokens": "answers",
    "vllm:request_params_max_tokens": "answers",
    "vllm:request_params_n": "answers",
    "vllm:request_queue_time_seconds": "answers",
    "vllm:request_prefill_time_seconds": "answers",
    "vllm:request_decode_time_seconds": "answers",
    "vllm:request_inference_time_seconds": "answers",
    "vllm:cache_config_info": "death",
    "blocktable:kv_blocks": "crowd",
    "blocktable:internal_fragmentation_ratio": "answers",
    "blocktable:kv_rows_taken": "answers",
    "blocktable:kv_rows_wasted": "answers",
    "blocktable:external_fragmentation_ratio": "parked",
    "blocktable:evictions": "crowd",
    "blocktable:sequences_held": "crowd",
    "blocktable:reasons": "answers",
    "blocktable:preemptions": "crowd",
    "blocktable:recomputed_tokens": "crowd",
    "blocktable:requests_refused": "refusal",
    "blocktable:requests_ended": "answers",
    "blocktable:queue_seconds": "answers",
    "blocktable:first_token_seconds": "answers",
    "blocktable:steps": "answers",
    "blocktable:failed_steps": "answers",  # the fake's pass 1 raises once
    "blocktable:scheduled_tokens": "answers",
    "blocktable:step_phase_seconds": "answers",
    "blocktable:scheduler_cpu_seconds": "answers",
    "blocktable:scheduler_call_seconds": "answers",
    "blocktable:engine_cpu_seconds": "answers",
    "blocktable:engine_resident_bytes": "answers",
    "blocktable:server_cpu_seconds": "answers",
    "blocktable:server_resident_bytes": "answers",
    "blocktable:engine_up": "death",
    "blocktable:engine_deaths": "death",
    "blocktable:engine_still_seconds": "stop",
    "blocktable:engine_heard_seconds": "stop",
    "blocktable:open_requests": "crowd",
    "blocktable:log_lines_lost": "answers",  # told to be one more at each scrape
    "blocktable:tenant_requests": "answers",
    "blocktable:tenant_prompt_tokens": "answers",
    "blocktable:tenant_cached_tokens": "answers",
    "blocktable:tenant_output_tokens": "answers",
}

Values = dict[str, dict[str, float]]
"""series: (its labels: value)"""


def values(text: bytes) -> Values:
    """Of a scrape. Of a histogram its count."""
    found: Values = {}
    for family in text_string_to_metric_families(text.decode()):
        for sample in family.samples:
            if family.type != "histogram" or sample.name.endswith("_count"):
                found.setdefault(family.name, {})[json.dumps(sample.labels, sort_keys=True)] = sample.value
    return found


def moved(name: str, scrapes: list[Values]) -> bool:
    """Whether a series was ever another than in the first scrape."""
    return any(scrape.get(name) != scrapes[0].get(name) for scrape in scrapes)


class Scenes:
    """Lets things happen to one engine, and scrapes before, meanwhile and after."""

    def __init__(self, supervisor: Supervisor) -> None:
        self._supervisor = supervisor
        self.client = WatchedClient(supervisor)
        self._lost = 0
        self._refusals = Refusals()
        self.metrics = Metrics(
            self.client,
            self.client.figures,
            num_deaths=lambda: supervisor.num_deaths,
            lost_log_lines=self._lose,
            refusals=self._refusals,
        )

    def _lose(self) -> int:
        self._lost += 1
        return self._lost

    async def scrapes(self, scene: Callable[[], Awaitable[object]]) -> list[Values]:
        """From before to after."""
        found = [values((await self.metrics.text())[0])]
        happening = asyncio.ensure_future(scene())
        while not happening.done():
            found.append(values((await self.metrics.text())[0]))
            await asyncio.sleep(0.005)
        await happening
        return [*found, values((await self.metrics.text())[0])]

    async def answers(self) -> None:
        # So that the server's memory is another, too. Not from the allocator, which may have as much at hand.
        self._held = mmap.mmap(-1, 2**24)
        self._held.write(b"x" * 2**24)
        for place in range(3):
            await read(self.client, request(list(range(40)), 12, f"a{place}", tenant="acme"))

    async def crowd(self) -> None:
        """More than may run, more than fits: some wait, some lose their blocks, cached content goes."""
        asked = [request([50 + place] * 9, 120, f"c{place}") for place in range(8)]
        await asyncio.gather(*(read(self.client, one) for one in asked))

    async def parked(self) -> None:
        """A long prompt is computed in several slow steps; meanwhile others leave, each with its next token under way."""

        async def leave(place: int) -> None:
            async with aclosing(self.client.generate(request([150 + place], 100, f"p{place}"))) as pieces:
                for _ in range(1 + place):
                    await anext(pieces)

        await asyncio.gather(*map(leave, range(3)), read(self.client, request(list(range(200)) + [7] * 40, 2, "long")))

    async def refusal(self) -> None:
        """As clients meet it, over HTTP."""
        app = make_app(Serving.of(self.client, refusals=self._refusals), Tenants())
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost", timeout=60) as client:

            async def ask(body: dict[str, Any]) -> int:
                return (await client.post("/v1/completions", json=body)).status_code

            assert await ask({"prompt": [1] * 3000, "max_tokens": 100}) == 400
            assert await ask({"prompt": [1], "priority": 5}) == 400
            # A step takes in one of them, and lasts longer than all of them need to come.
            many = [ask({"prompt": [100 + place] * 40, "max_tokens": 2}) for place in range(16)]
            assert 429 in await asyncio.gather(*many)

    async def stop(self) -> None:
        process = self._supervisor.process_id
        assert process is not None
        running = asyncio.ensure_future(read(self.client, request([1], 20, "s")))
        os.kill(process, signal.SIGSTOP)
        await asyncio.sleep(0.3)
        os.kill(process, signal.SIGCONT)
        await running

    async def death(self) -> None:
        process = self._supervisor.process_id
        assert process is not None
        os.kill(process, signal.SIGKILL)
        while self._supervisor.num_deaths == 0:
            await asyncio.sleep(0.01)


@pytest.fixture(scope="module")
def scraped(launch: Launch) -> Iterator[dict[str, list[Values]]]:
    """What was scraped in each scene."""
    patch = pytest.MonkeyPatch()
    patch.setattr(metrics_module, "FRESH_S", 0.0)
    options: dict[str, Any] = {"num_blocks": 40, "max_num_seqs": 4, "overlap_depth": 2, "estimate_growth": False}
    options |= {"max_waiting": 8}
    options |= {"max_num_batched_tokens": 40, "fake_step_ms": 10.0, "fake_token_us": 3000.0, "fake_raise_at": 1}

    async def main() -> dict[str, list[Values]]:
        supervisor = Supervisor(launch(**options))
        await supervisor.start()
        try:
            scenes = Scenes(supervisor)
            order = (scenes.answers, scenes.crowd, scenes.parked, scenes.refusal, scenes.stop, scenes.death)
            return {scene.__name__: await scenes.scrapes(scene) for scene in order}
        finally:
            await supervisor.close()

    yield asyncio.run(asyncio.wait_for(main(), 250))
    patch.undo()


def test_every_series_has_what_moves_it() -> None:
    assert sorted(MOVED_BY) == sorted(series.name for series in SERIES)


@pytest.mark.parametrize("name", MOVED_BY)
def test_a_series_moves_when_it_should(name: str, scraped: dict[str, list[Values]]) -> None:
    assert moved(name, scraped[MOVED_BY[name]])


def test_counters_only_grow(scraped: dict[str, list[Values]]) -> None:
    for series in SERIES:
        if series.kind == "counter":
            for scrapes in scraped.values():
                for before, after in pairwise(scrapes):
                    for labels, value in before.get(series.name, {}).items():
                        assert after.get(series.name, {}).get(labels, value) >= value, series.name


def test_gauges_are_back_when_nothing_runs(scraped: dict[str, list[Values]]) -> None:
    last = scraped["crowd"][-1]
    for name in (
        "vllm:num_requests_running",
        "vllm:num_requests_waiting",
        "blocktable:open_requests",
        "vllm:kv_cache_usage_perc",
    ):
        assert set(last[name].values()) == {0.0}, name


def test_hits_never_exceed_queries_and_a_retry_counts_once(scraped: dict[str, list[Values]]) -> None:
    """Fault 133: prompts that wait, are tried again, and are computed again after a preemption are counted once."""
    first, last = scraped["crowd"][0], scraped["crowd"][-1]
    [queries] = last["vllm:prefix_cache_queries"].values()
    [before] = first["vllm:prefix_cache_queries"].values()
    assert queries - before == 8 * 9
    [hits] = last["vllm:prefix_cache_hits"].values()
    assert hits <= queries


def test_a_dead_engine_leaves_out_its_own_series_only(scraped: dict[str, list[Values]]) -> None:
    dead = [scrape for scrape in scraped["death"] if "blocktable:steps" not in scrape]
    assert dead, "it was scraped while the engine was dead"
    for scrape in dead:
        assert "vllm:prompt_tokens" in scrape
        assert set(scrape["blocktable:engine_up"].values()) <= {0.0, 1.0}


def test_a_series_that_stands_still_is_caught() -> None:
    """The check above can fail."""
    still: list[Values] = [{"a": {"": 1.0}, "b": {"": 1.0}}, {"a": {"": 1.0}, "b": {"": 2.0}}, {"a": {"": 1.0}}]
    assert not moved("a", still)
    assert moved("b", still)
    assert not moved("missing", still)


def test_tenants_of_clients_do_not_make_the_metrics_grow() -> None:
    figures = RequestFigures()
    names = {figures.tenant(f"tenant-{place}") for place in range(10_000)}
    assert len(names) == MAX_TENANTS + 1
    assert "other" in names
    assert figures.tenant(None) == ""


def test_names_that_autoscalers_and_gateways_read_are_there() -> None:
    names = {series.name for series in SERIES}
    assert {"vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc"} <= names
    assert all(re.fullmatch(r"(vllm|blocktable):[a-z0-9_]+", name) for name in names)


@pytest.mark.parametrize("kind", ["never_fits", "queue_full", "invalid_input"])
def test_each_kind_of_refusal_is_counted_as_its_own(kind: str, scraped: dict[str, list[Values]]) -> None:
    first, *_, last = (scrape["blocktable:requests_refused"] for scrape in scraped["refusal"])
    assert sum(last[labels] - first[labels] for labels in last if json.loads(labels)["reason"] == kind) > 0


def test_every_metric_that_the_dashboard_names_exists() -> None:
    dashboard = (ROOT / "docs" / "grafana.json").read_text(encoding="utf-8")
    json.loads(dashboard)
    named = set(re.findall(r"(?:vllm|blocktable):[a-z0-9_]+", dashboard))
    assert named - _exported() == set()
    assert len(named) > 20


def test_the_operators_page_tells_of_every_metric_once_and_in_the_same_words() -> None:
    page = (ROOT / "docs" / "operating.md").read_text(encoding="utf-8")
    told = [line for line in page.splitlines() if re.match(r"\| `(vllm|blocktable):", line)]
    assert told == [f"| `{one.name}` | {one.kind} | {', '.join(one.labels)} | {one.meaning} |" for one in SERIES]


def test_the_phases_of_a_request_add_up() -> None:
    figures = RequestFigures()
    watched = WatchedRequest(figures, request([1, 2], 5, "a", tenant="acme"))
    watched.saw(Piece("x", [1], None))
    watched.saw(Piece("yz", [2, 3], "length", times=TIMES))
    watched.ended("length")
    found = [getattr(figures, f"{name}_s").sum for name in ("queued", "prefill", "decode", "inference")]
    assert found == [2.0, 3.0, 5.0, 8.0]
    assert figures.num_answers.buckets()[0] == ("1", 1.0)


def test_each_answer_has_its_end_and_who_left_when_some_had_ended_has_left() -> None:
    async def two(request: EngineRequest) -> AsyncGenerator[Piece, None]:
        yield Piece("a", [1], "stop")
        yield Piece("b", [1], None, index=1)
        yield Piece("c", [1], "length", index=1)

    async def ends(num_read: int) -> tuple[dict[str, int], dict[tuple[str, str], int]]:
        client = WatchedClient(FakeEngine(two))
        asked = EngineRequest(request_id="a", prompt_token_ids=[1], sampling={"n": 2})
        async with aclosing(client.generate(asked)) as pieces:
            async for _ in pieces:
                num_read -= 1
                if num_read == 0:
                    break
        return dict(client.figures.ends), dict(client.figures.tenant_ends)

    left = {"stop": 1, "left": 1}, {("", "left"): 1}
    assert [asyncio.run(ends(count)) for count in (1, 2)] == [left, left]
    assert asyncio.run(ends(3)) == ({"stop": 1, "length": 1}, {("", "length"): 1})


def test_the_model_is_called_in_metrics_as_clients_call_it() -> None:
    class Dead(FakeEngine):
        async def snapshot(self) -> dict[str, Any]:
            raise EngineDeadError("so that its own series are left out")

    scrape = asyncio.run(Metrics(Dead(), RequestFigures(), model_name="chat").text())[0].decode()
    assert 'model_name="chat"' in scrape
    assert 'model_name="fake"' not in scrape


def test_the_cache_is_told_as_it_is_made(scraped: dict[str, list[Values]]) -> None:
    [(labels, value)] = scraped["answers"][-1]["vllm:cache_config_info"].items()
    told = json.loads(labels)
    assert [told[name] for name in ("block_size", "num_gpu_blocks", "cache_dtype")] == ["8", "40", "float32"]
    assert value == 1.0


def _exported() -> set[str]:
    """Names as Prometheus has them."""
    names: set[str] = set()
    for series in SERIES:
        if series.kind == "histogram":
            names |= {f"{series.name}_{part}" for part in ("bucket", "count", "sum")}
        else:
            names.add(series.name + ("_total" if series.kind == "counter" else ""))
    return names
