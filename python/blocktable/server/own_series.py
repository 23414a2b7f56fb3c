"""The metrics of our own, `blocktable:`: blocks, decisions, steps, processes, tenants.

Before: `series.py` says what one is. After: `metrics.py` tells them. Always: labels of clients' choice are bounded
(`request_watch.MAX_TENANTS`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

from .engine_client import EngineState
from .refusals import Refusal
from .series import Series, Sources, Values, one, ratio, stat, stats, usable_blocks
from .snapshot import resident_bytes


def _engine(read: Callable[[Mapping[str, Any]], Values]) -> Callable[[Sources], Values]:
    return lambda sources: [] if sources.engine is None else read(sources.engine)


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


def _tenant_tokens(kind: str) -> Callable[[Sources], Values]:
    return lambda sources: [
        ((tenant,), count) for (tenant, what), count in sources.requests.tenant_tokens.items() if what == kind
    ]


OWN_SERIES: tuple[Series, ...] = (
    # Blocks.
    Series(
        "blocktable:kv_blocks",
        "gauge",
        "KV blocks: all (with the null block), free (cached ones among them), held, cached (content that can be found), parked"
        " (free when the step in flight ends), pinned, peak (held at most so far).",
        stats(
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
        ratio("wasted_rows_sum", lambda stats: stats["taken_rows_sum"]),
    ),
    Series("blocktable:kv_rows_taken", "counter", "Rows of held blocks, summed over steps.", stat("taken_rows_sum")),
    Series("blocktable:kv_rows_wasted", "counter", "Those of them without a token.", stat("wasted_rows_sum")),
    Series(
        "blocktable:external_fragmentation_ratio",
        "gauge",
        "Share of the blocks that nobody holds and nobody can take: parked behind a step in flight. Blocks are never apart.",
        ratio("parked_blocks", usable_blocks),
    ),
    Series("blocktable:evictions", "counter", "Cached blocks that forgot their content to be used.", stat("evictions")),
    Series("blocktable:sequences_held", "gauge", "Sequences that hold blocks.", stat("running")),
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
        stats({"preempted_by": "reason_preempted_by", "put_back": "reason_put_back"}),
        labels=("reason",),
    ),
    Series(
        "blocktable:recomputed_tokens",
        "counter",
        "Tokens that had been computed, or were being computed, and were given up: preempted_by and put_back as above,"
        " step_failed because the model raised.",
        stats({"preempted_by": "recomputed_tokens", "put_back": "put_back_tokens", "step_failed": "failed_tokens"}),
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
        "Answers by the core's books: finished, aborted, expired (of those aborted, by their deadline), queue_expired.",
        stats({name: name for name in ("finished", "aborted", "expired", "queue_expired")}),
        labels=("how",),
    ),
    Series("blocktable:queue_seconds", "counter", "Time to the first admission, summed.", stat("queue_us_sum", 1e-6)),
    Series("blocktable:first_token_seconds", "counter", "Time to the first output, summed.", stat("first_token_us_sum", 1e-6)),
    # Steps.
    Series("blocktable:steps", "counter", "Steps with something to run.", stat("steps")),
    Series("blocktable:failed_steps", "counter", "Steps whose model failed.", stat("failed_steps")),
    Series("blocktable:scheduled_tokens", "counter", "Tokens planned, prompts and outputs.", stat("scheduled_tokens")),
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
        one(lambda _: time.process_time()),
        of_engine=False,
    ),
    Series(
        "blocktable:server_resident_bytes",
        "gauge",
        "Memory of the server in RAM.",
        one(lambda _: float(resident_bytes())),
        of_engine=False,
    ),
    Series(
        "blocktable:engine_up",
        "gauge",
        "1 if the engine takes requests or finishes them, else 0.",
        one(lambda sources: float(sources.state in (EngineState.READY, EngineState.DRAINING))),
        of_engine=False,
    ),
    Series(
        "blocktable:engine_deaths",
        "counter",
        "Times that the engine's process ended unasked.",
        one(lambda sources: float(sources.num_deaths)),
        of_engine=False,
    ),
    Series(
        "blocktable:engine_still_seconds",
        "gauge",
        "Seconds without a step although there is work.",
        one(lambda sources: sources.progress.still_s),
        of_engine=False,
    ),
    Series(
        "blocktable:engine_heard_seconds",
        "gauge",
        "Seconds since the engine was last heard of.",
        one(lambda sources: sources.progress.heard_s),
        of_engine=False,
    ),
    Series(
        "blocktable:open_requests",
        "gauge",
        "Requests that clients wait for.",
        one(lambda sources: float(sources.requests.num_open)),
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
        "Requests of a tenant by how they ended, of several answers by how the last one did.",
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
