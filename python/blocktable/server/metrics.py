"""Every metric: its name, what it means, and where its value is read. Prometheus' text is made from this table when it is
asked for.

Before: `EngineClient.snapshot` (the core's counters, the step loop's clocks), what `request_watch.py` counted, the process's
own figures. After: `/metrics` of `admin.py`. Always: names are vLLM's where the meaning is the same, and begin with
`blocktable:` where it is ours; nothing is computed in a step; an engine that does not answer leaves out its own series and
nobody else's. Labels of every series: `model_name`, `engine`. Labels of clients' choice are bounded
(`request_watch.MAX_TENANTS`).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from ..errors import BlocktableError
from .engine_client import EngineClient, EngineInfo, EngineState, Progress
from .histogram import Histogram
from .refusals import Refusal, Refusals
from .request_watch import RequestFigures
from .snapshot import resident_bytes

FRESH_S = 0.5
"""Seconds that a snapshot serves for several scrapes."""

PATIENCE_S = 2.0
"""Seconds that a scrape waits for the engine."""

Values = Iterable[tuple[tuple[str, ...], float]]
"""(values of the labels, value)"""


@dataclass(frozen=True, slots=True)
class Sources:
    """What is read for one scrape. `engine` is None if the engine did not answer."""

    engine: Mapping[str, Any] | None
    requests: RequestFigures
    refusals: Refusals
    progress: Progress
    state: EngineState
    info: EngineInfo | None
    num_deaths: int
    lost_log_lines: int

    @property
    def stats(self) -> Mapping[str, int]:
        """The core's counters."""
        stats: Mapping[str, int] = {} if self.engine is None else self.engine["stats"]
        return stats


@dataclass(frozen=True, slots=True)
class Series:
    """One metric. Counters are told with `_total` behind their names."""

    name: str
    kind: Literal["gauge", "counter", "histogram"]
    meaning: str
    read: Callable[[Sources], Values | Histogram]
    labels: tuple[str, ...] = ()
    of_engine: bool = True
    """Left out while the engine does not answer."""


def _stat(name: str, scale: float = 1.0) -> Callable[[Sources], Values]:
    return lambda sources: [((), sources.stats[name] * scale)]


def _stats(names: Mapping[str, str]) -> Callable[[Sources], Values]:
    return lambda sources: [((label,), sources.stats[name]) for label, name in names.items()]


def _ratio(part: str, whole: Callable[[Mapping[str, int]], int]) -> Callable[[Sources], Values]:
    return lambda sources: [((), sources.stats[part] / max(whole(sources.stats), 1))]


def _usable(stats: Mapping[str, int]) -> int:
    return stats["num_blocks"] - 1  # without the null block


def _one(value: Callable[[Sources], float]) -> Callable[[Sources], Values]:
    return lambda sources: [((), value(sources))]


def _engine(read: Callable[[Mapping[str, Any]], Values]) -> Callable[[Sources], Values]:
    return lambda sources: [] if sources.engine is None else read(sources.engine)


def _histogram(name: str) -> Callable[[Sources], Histogram]:
    def read(sources: Sources) -> Histogram:
        found: Histogram = getattr(sources.requests, name)
        return found

    return read


def _reasons(sources: Sources) -> Values:
    return [((name[7:],), value) for name, value in sources.stats.items() if name.startswith("reason_")]


def _call_times(engine: Mapping[str, Any]) -> Values:
    for call, name in (("plan", "plan_us"), ("commit", "commit_us"), ("both_cpu", "scheduler_cpu_us")):
        for percentile, value in engine[name].items():
            yield (call, f"{float(percentile) / 100:g}"), value / 1e6


def _lost_lines(sources: Sources) -> Values:
    yield ("server",), sources.lost_log_lines
    if sources.engine is not None:
        yield ("engine",), sources.engine["lost_log_lines"]


def _cache_config(info: EngineInfo) -> tuple[str, ...]:
    return str(info.block_size), str(info.num_blocks), info.dtype


def _tenant_tokens(kind: str) -> Callable[[Sources], Values]:
    return lambda sources: [
        ((tenant,), count) for (tenant, what), count in sources.requests.tenant_tokens.items() if what == kind
    ]


def _tokens(kind: str) -> Callable[[Sources], float]:
    return lambda sources: sum(count for (_, what), count in sources.requests.tenant_tokens.items() if what == kind)


SERIES: tuple[Series, ...] = (
    # What vLLM has too.
    Series("vllm:num_requests_running", "gauge", "Requests that hold a row and are computed.", _stat("running")),
    Series("vllm:num_requests_waiting", "gauge", "Requests that wait to be admitted.", _stat("waiting")),
    Series("vllm:kv_cache_usage_perc", "gauge", "Share of the KV blocks that is held, 0 to 1.", _ratio("used_blocks", _usable)),
    Series("vllm:prefix_cache_queries", "counter", "Prompt tokens of admitted requests, each once.", _stat("prefix_queries")),
    Series("vllm:prefix_cache_hits", "counter", "Those of them that were found in the prefix cache.", _stat("prefix_hits")),
    Series("vllm:num_preemptions", "counter", "Times that a request lost its blocks.", _stat("preemptions")),
    Series("vllm:prompt_tokens", "counter", "Prompt tokens of requests that ended.", _one(_tokens("prompt")), of_engine=False),
    Series("vllm:generation_tokens", "counter", "Tokens given to clients.", _one(_tokens("output")), of_engine=False),
    Series(
        "vllm:request_success",
        "counter",
        "Requests by how they ended: stop, length, abort, refused, error, left (the client went), or an error's name.",
        lambda sources: [((how,), count) for how, count in sources.requests.ends.items()],
        labels=("finished_reason",),
        of_engine=False,
    ),
    Series(
        "vllm:time_to_first_token_seconds",
        "histogram",
        "From the request's arrival to its first token, as the server sees it.",
        _histogram("first_token_s"),
        of_engine=False,
    ),
    Series(
        "vllm:inter_token_latency_seconds",
        "histogram",
        "Between two tokens of a stream; tokens that came together share the time.",
        _histogram("between_tokens_s"),
        of_engine=False,
    ),
    Series(
        "vllm:request_time_per_output_token_seconds",
        "histogram",
        "Mean time of a streamed request's tokens behind the first.",
        _histogram("per_output_token_s"),
        of_engine=False,
    ),
    Series(
        "vllm:e2e_request_latency_seconds",
        "histogram",
        "From a request's arrival to its end.",
        _histogram("whole_s"),
        of_engine=False,
    ),
    Series(
        "vllm:request_prompt_tokens",
        "histogram",
        "Prompt tokens of a request.",
        _histogram("prompt_tokens"),
        of_engine=False,
    ),
    Series(
        "vllm:request_generation_tokens",
        "histogram",
        "Output tokens of a request.",
        _histogram("output_tokens"),
        of_engine=False,
    ),
    Series(
        "vllm:request_params_max_tokens",
        "histogram",
        "What requests asked as max_tokens.",
        _histogram("max_tokens"),
        of_engine=False,
    ),
    Series(
        "vllm:request_params_n",
        "histogram",
        "How many answers requests asked for.",
        _histogram("num_answers"),
        of_engine=False,
    ),
    Series(
        "vllm:request_queue_time_seconds",
        "histogram",
        "From a request's arrival in the engine to its first admission.",
        _histogram("queued_s"),
        of_engine=False,
    ),
    Series(
        "vllm:request_prefill_time_seconds",
        "histogram",
        "From its first admission to its first token.",
        _histogram("prefill_s"),
        of_engine=False,
    ),
    Series(
        "vllm:request_decode_time_seconds",
        "histogram",
        "From its first token to its last.",
        _histogram("decode_s"),
        of_engine=False,
    ),
    Series(
        "vllm:request_inference_time_seconds",
        "histogram",
        "From its first admission to its last token.",
        _histogram("inference_s"),
        of_engine=False,
    ),
    Series(
        "vllm:cache_config_info",
        "gauge",
        "Always 1: its labels tell how the KV cache is made.",
        lambda sources: [] if sources.info is None else [(_cache_config(sources.info), 1.0)],
        labels=("block_size", "num_gpu_blocks", "cache_dtype"),
    ),
    # Blocks.
    Series(
        "blocktable:kv_blocks",
        "gauge",
        "KV blocks: all (with the null block), free (cached ones among them), held, cached (content that can be found), parked"
        " (free when the step in flight ends), pinned, peak (held at most so far).",
        _stats(
            {
                "all": "num_blocks",
                "free": "free_blocks",
                "held": "used_blocks",
                "cached": "published_blocks",
                "parked": "parked_blocks",
                "pinned": "pinned_blocks",
                "peak": "peak_blocks",
            }
        ),
        labels=("kind",),
    ),
    Series(
        "blocktable:internal_fragmentation_ratio",
        "gauge",
        "Share of the rows of held blocks that held no token, over all steps so far.",
        _ratio("wasted_rows_sum", lambda stats: stats["taken_rows_sum"]),
    ),
    Series("blocktable:kv_rows_taken", "counter", "Rows of held blocks, summed over steps.", _stat("taken_rows_sum")),
    Series("blocktable:kv_rows_wasted", "counter", "Those of them without a token.", _stat("wasted_rows_sum")),
    Series(
        "blocktable:external_fragmentation_ratio",
        "gauge",
        "Share of the blocks that nobody holds and nobody can take: parked behind a step in flight. Blocks are never apart.",
        _ratio("parked_blocks", _usable),
    ),
    Series("blocktable:evictions", "counter", "Cached blocks that forgot their content to be used.", _stat("evictions")),
    Series("blocktable:sequences_held", "gauge", "Sequences that hold blocks.", _stat("running")),
    # Decisions.
    Series(
        "blocktable:reasons",
        "counter",
        "Waits, losses, refusals and ends by their reason; see docs/reasons.md.",
        _reasons,
        labels=("reason",),
    ),
    Series(
        "blocktable:preemptions",
        "counter",
        "Sequences that lost their blocks: preempted_by another's growth, put_back because a shared block was withdrawn.",
        _stats({"preempted_by": "reason_preempted_by", "put_back": "reason_put_back"}),
        labels=("reason",),
    ),
    Series(
        "blocktable:recomputed_tokens",
        "counter",
        "Tokens that had been computed, or were being computed, and were given up: preempted_by and put_back as above,"
        " step_failed because the model raised.",
        _stats({"preempted_by": "recomputed_tokens", "put_back": "put_back_tokens", "step_failed": "failed_tokens"}),
        labels=("reason",),
    ),
    Series(
        "blocktable:requests_refused",
        "counter",
        "Requests answered with a refusal, by the server or by the engine: " + ", ".join(one.value for one in Refusal) + ".",
        lambda sources: [((one.value,), sources.refusals.counts[one]) for one in Refusal],
        labels=("reason",),
        of_engine=False,
    ),
    Series(
        "blocktable:requests_ended",
        "counter",
        "Requests by the core's books: finished, aborted, expired (of those aborted, by their deadline), queue_expired.",
        _stats({name: name for name in ("finished", "aborted", "expired", "queue_expired")}),
        labels=("how",),
    ),
    Series("blocktable:queue_seconds", "counter", "Time to the first admission, summed.", _stat("queue_us_sum", 1e-6)),
    Series("blocktable:first_token_seconds", "counter", "Time to the first output, summed.", _stat("first_token_us_sum", 1e-6)),
    # Steps.
    Series("blocktable:steps", "counter", "Steps with something to run.", _stat("steps")),
    Series("blocktable:failed_steps", "counter", "Steps whose model failed.", _stat("failed_steps")),
    Series("blocktable:scheduled_tokens", "counter", "Tokens planned, prompts and outputs.", _stat("scheduled_tokens")),
    Series(
        "blocktable:step_phase_seconds",
        "counter",
        "Wall time of the steps by phase: plan, model (the wait for logits), sample, commit, hand_out (text and streams).",
        _engine(lambda engine: [((phase,), value / 1e9) for phase, value in engine["phases_ns"].items()]),
        labels=("phase",),
    ),
    Series(
        "blocktable:scheduler_cpu_seconds",
        "counter",
        "CPU time of plan and commit: scheduling, block allocation, prefix lookup.",
        _engine(lambda engine: [((), engine["scheduler_cpu_ns"] / 1e9)]),
    ),
    Series(
        "blocktable:scheduler_call_seconds",
        "gauge",
        "Quantiles of one plan, one commit (wall), and both together (CPU), over the last 65,536 steps.",
        _engine(_call_times),
        labels=("call", "quantile"),
    ),
    # Processes.
    Series(
        "blocktable:engine_cpu_seconds",
        "counter",
        "CPU time of the engine's process.",
        _engine(lambda e: [((), e["process_cpu_s"])]),
    ),
    Series(
        "blocktable:engine_resident_bytes",
        "gauge",
        "Memory of the engine's process in RAM.",
        _engine(lambda engine: [((), engine["resident_bytes"])]),
    ),
    Series(
        "blocktable:server_cpu_seconds",
        "counter",
        "CPU time of the server.",
        _one(lambda _: time.process_time()),
        of_engine=False,
    ),
    Series(
        "blocktable:server_resident_bytes",
        "gauge",
        "Memory of the server in RAM.",
        _one(lambda _: float(resident_bytes())),
        of_engine=False,
    ),
    Series(
        "blocktable:engine_up",
        "gauge",
        "1 if the engine takes requests or finishes them, else 0.",
        _one(lambda sources: float(sources.state in (EngineState.READY, EngineState.DRAINING))),
        of_engine=False,
    ),
    Series(
        "blocktable:engine_deaths",
        "counter",
        "Times that the engine's process ended unasked.",
        _one(lambda sources: float(sources.num_deaths)),
        of_engine=False,
    ),
    Series(
        "blocktable:engine_still_seconds",
        "gauge",
        "Seconds without a step although there is work.",
        _one(lambda sources: sources.progress.still_s),
        of_engine=False,
    ),
    Series(
        "blocktable:engine_heard_seconds",
        "gauge",
        "Seconds since the engine was last heard of.",
        _one(lambda sources: sources.progress.heard_s),
        of_engine=False,
    ),
    Series(
        "blocktable:open_requests",
        "gauge",
        "Requests that clients wait for.",
        _one(lambda sources: float(sources.requests.num_open)),
        of_engine=False,
    ),
    Series(
        "blocktable:log_lines_lost",
        "counter",
        "Lines of the log that could not be written, in time or at all, of the server and of the engine.",
        _lost_lines,
        labels=("process",),
        of_engine=False,
    ),
    # Tenants.
    Series(
        "blocktable:tenant_requests",
        "counter",
        "Requests of a tenant by how they ended.",
        lambda sources: [(labels, count) for labels, count in sources.requests.tenant_ends.items()],
        labels=("tenant", "finished_reason"),
        of_engine=False,
    ),
    Series(
        "blocktable:tenant_prompt_tokens",
        "counter",
        "Prompt tokens of a tenant.",
        _tenant_tokens("prompt"),
        labels=("tenant",),
        of_engine=False,
    ),
    Series(
        "blocktable:tenant_cached_tokens",
        "counter",
        "Those of them that were found in the prefix cache.",
        _tenant_tokens("cached"),
        labels=("tenant",),
        of_engine=False,
    ),
    Series(
        "blocktable:tenant_output_tokens",
        "counter",
        "Output tokens of a tenant.",
        _tenant_tokens("output"),
        labels=("tenant",),
        of_engine=False,
    ),
)


class Metrics:
    """Prometheus' text for one server."""

    def __init__(
        self,
        client: EngineClient,
        requests: RequestFigures,
        *,
        num_deaths: Callable[[], int] = lambda: 0,
        lost_log_lines: Callable[[], int] = lambda: 0,
        model_name: str | None = None,
        refusals: Refusals | None = None,
    ) -> None:
        """`model_name`: what clients call the model; None = as the engine does."""
        self._model_name = model_name
        self._client = client
        self._requests = requests
        self._refusals = Refusals() if refusals is None else refusals
        self._num_deaths = num_deaths
        self._lost_log_lines = lost_log_lines
        self._asked_at = float("-inf")
        self._snapshot: Mapping[str, Any] | None = None
        self._lock = asyncio.Lock()

    async def text(self, accept: str | None = None) -> tuple[bytes, str]:
        """The text and its content type, as the header `Accept` wants it. Waits at most `PATIENCE_S` for the engine."""
        sources = Sources(
            engine=await self._fresh_snapshot(),
            requests=self._requests,
            refusals=self._refusals,
            progress=self._client.progress,
            state=self._client.state,
            info=self._info(),
            num_deaths=self._num_deaths(),
            lost_log_lines=self._lost_log_lines(),
        )
        registry = CollectorRegistry()
        name = self._model_name or ("" if sources.info is None else sources.info.model)
        registry.register(_Table(sources, name))
        encode, content_type = choose_encoder(accept or "")
        return encode(registry), content_type

    async def _fresh_snapshot(self) -> Mapping[str, Any] | None:
        async with self._lock:
            if time.monotonic() - self._asked_at >= FRESH_S:
                try:
                    self._snapshot = await asyncio.wait_for(self._client.snapshot(), PATIENCE_S)
                except (BlocktableError, TimeoutError):
                    self._snapshot = None
                self._asked_at = time.monotonic()
            return self._snapshot

    def _info(self) -> EngineInfo | None:
        try:
            return self._client.info
        except BlocktableError:
            return None


class _Table(Collector):
    """`SERIES` with the values of one moment."""

    def __init__(self, sources: Sources, model_name: str) -> None:
        self._sources = sources
        self._always = (model_name, "0")

    def collect(self) -> Iterator[Metric]:
        for series in SERIES:
            if series.of_engine and self._sources.engine is None:
                continue
            yield self._family(series)

    def _family(self, series: Series) -> Metric:
        labels = ("model_name", "engine", *series.labels)
        value = series.read(self._sources)
        if isinstance(value, Histogram):
            histogram = HistogramMetricFamily(series.name, series.meaning, labels=labels)
            histogram.add_metric(self._always, value.buckets(), value.sum)
            return histogram
        kind = GaugeMetricFamily if series.kind == "gauge" else CounterMetricFamily
        family: GaugeMetricFamily | CounterMetricFamily = kind(series.name, series.meaning, labels=labels)
        for given, number in value:
            family.add_metric((*self._always, *given), number)
        return family
