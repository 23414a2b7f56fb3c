"""Times a scheduler on a recorded workload: arrivals, chunked prefill, hits, ends and preemptions as they came.

Before: `blocktable bench replay --trace FILE`. After: one row per trace. The model is replaced by random ids and by a clock
that moves `--step-ms` a step, so the same file gives the same schedule every time, whatever the machine.
"""

import argparse
import gc
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from time import thread_time_ns

import numpy as np

from .. import _core
from .._core import Scheduler
from ..errors import InvalidInputError, NeverFitsError
from .clock import quantiles_us
from .command import count
from .load import BLOCK_SIZE, VOCAB_SIZE, Answers
from .row import Row, check
from .traces import Arrival, Tokens, read_trace

SUMMARY = """Replay a workload through the scheduler on a virtual clock: requests/s of its time, hits, waste, tail.

A step lasts --step-ms of the virtual clock, whatever it holds; arrivals come --speed times as fast as they were recorded.
Times are CPU time of the thread, over all steps that ran something. requests_per_s is what one core could schedule: requests
over the CPU time of all submits, plans and commits. hit_rate is prompt tokens found in the cache over all prompt tokens,
kv_waste the share of taken rows that hold no token, weighted over steps. A request whose prompt and output exceed --max-len,
or which can never fit, is left out and counted; one that outgrows the whole pool ends for want of capacity and is counted.

--mixed N makes up a workload of N requests: prompts with one of 32 shared beginnings, in chunks, on a pool that is too small
for all that come, so that some wait and some are preempted. allocs_per_step is null in a build that does not count."""

TABLE = (
    "trace", "requests", "speed", "blocks", "steps", "requests_per_s", "hit_rate", "preemptions", "kv_waste", "running_mean",
    "step_us_p50", "step_us_p99", "step_us_p999", "step_us_max", "submit_us_p50", "ns_per_token", "gc_objects_per_step",
    "allocs_per_step",
)  # fmt: skip

SMOKE = 24
"""Requests of the invented workload of a smoke run."""
MIXED_BLOCKS = 10000
MIXED_US = 1500
"""Time between two arrivals of `--mixed`, on average."""


@dataclass(slots=True)
class Replayed:
    """What one replay showed."""

    step_ns: list[int] = field(default_factory=list)
    submit_ns: list[int] = field(default_factory=list)
    left_out: int = 0
    outgrown: int = 0
    running_sum: int = 0
    scheduled_tokens: int = 0
    gc_objects: int = 0
    allocations: int = 0


def add_options(parser: argparse.ArgumentParser) -> None:
    """Which trace, and on what pool."""
    parser.add_argument("--trace", nargs="+", metavar="FILE", help="recorded workloads (.csv, .jsonl, also .gz or .zst)")
    parser.add_argument(
        "--mixed", type=count, metavar="N", help="a workload of N requests with everything in it, without a file"
    )
    parser.add_argument("--speed", type=count, default=100, help="times as fast as recorded (100)")
    parser.add_argument("--step-ms", type=count, default=10, help="virtual time of a step (10)")
    parser.add_argument("--requests", type=count, help="only the first so many")
    parser.add_argument("--blocks", type=count, default=100_000, help="pool size (100k)")
    parser.add_argument("--max-num-seqs", type=count, default=1024)
    parser.add_argument("--max-num-batched-tokens", type=count, default=8192)
    parser.add_argument("--max-len", type=count, default=131_072, help="longest request in tokens (128k)")


def rows(options: argparse.Namespace) -> Iterator[Row]:
    """One row per trace."""
    if options.smoke:
        options.blocks, options.max_num_seqs, options.max_num_batched_tokens, options.max_len = 40, 8, 128, 512
        yield _row("invented", _invented(), options)
        return
    if not options.trace and not options.mixed:
        raise InvalidInputError("trace", None, "name at least one file, or --mixed")
    if options.mixed:
        mixed = argparse.Namespace(**(vars(options) | {"speed": 1, "blocks": MIXED_BLOCKS, "max_num_batched_tokens": 2048}))
        yield _row("mixed", _mixed(options.mixed), mixed)
    for path in options.trace or []:
        yield _row(Path(path).name.split(".")[0], read_trace(path, VOCAB_SIZE, options.requests), options)


def _invented() -> list[Arrival]:
    """A small workload with a shared beginning, on a pool too small for it."""
    rng = np.random.default_rng(0)
    shared = rng.integers(0, VOCAB_SIZE, 40)
    tails: list[Tokens] = [rng.integers(0, VOCAB_SIZE, 30 + 7 * i) for i in range(SMOKE)]
    return [Arrival(2_000_000 * i, np.concatenate([shared, tail]), 20 + 5 * i) for i, tail in enumerate(tails)]


def _mixed(requests: int) -> list[Arrival]:
    """`requests` that arrive about as fast as 1,024 rows and `MIXED_BLOCKS` blocks serve them."""
    rng = np.random.default_rng(0)
    shared: list[Tokens] = [rng.integers(0, VOCAB_SIZE, 64 * (1 + i % 8)) for i in range(32)]
    times = np.cumsum(rng.exponential(MIXED_US, requests)).astype(np.int64).tolist()
    kinds, tails, outputs = (rng.integers(1, most + 1, requests).tolist() for most in (len(shared), 512, 512))
    return [
        Arrival(at_us, np.concatenate([shared[kind - 1], rng.integers(0, VOCAB_SIZE, tail)]), output)
        for at_us, kind, tail, output in zip(times, kinds, tails, outputs, strict=True)
    ]


def _row(name: str, arrivals: list[Arrival], options: argparse.Namespace) -> Row:
    scheduler = Scheduler(
        num_blocks=options.blocks,
        block_size=BLOCK_SIZE,
        vocab_size=VOCAB_SIZE,
        max_model_len=options.max_len,
        max_num_seqs=options.max_num_seqs,
        max_num_batched_tokens=options.max_num_batched_tokens,
        max_waiting=len(arrivals) + 1,
    )
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        replayed = _replay(scheduler, arrivals, speed=options.speed, step_us=1000 * options.step_ms)
    finally:
        gc.enable()
        gc.unfreeze()
    stats = scheduler.stats()
    _check_drained(scheduler, stats, expected=len(arrivals) - replayed.left_out - replayed.outgrown)
    step = np.array(replayed.step_ns, np.int64)
    spent_ns = int(step.sum()) + sum(replayed.submit_ns)
    keys: Row = {
        "bench": "replay", "trace": name, "speed": options.speed, "step_ms": options.step_ms, "blocks": options.blocks,
        "max_num_seqs": options.max_num_seqs, "max_num_batched_tokens": options.max_num_batched_tokens,
        "requests": len(arrivals) - replayed.left_out, "left_out": replayed.left_out, "outgrown": replayed.outgrown,
        "steps": len(step),
    }  # fmt: skip
    return keys | {
        "requests_per_s": round((len(arrivals) - replayed.left_out) / spent_ns * 1e9, 1),
        "hit_rate": round(stats["prefix_hits"] / max(1, stats["prefix_queries"]), 4),
        "preemptions": stats["preemptions"],
        "kv_waste": round(stats["wasted_rows_sum"] / max(1, stats["taken_rows_sum"]), 4),
        **{key: value for key, value in quantiles_us("step", step).items() if not key.endswith("p9999")},
        "running_mean": round(replayed.running_sum / len(step), 1),
        "submit_us_p50": round(float(np.median(replayed.submit_ns)) / 1000, 2),
        "ns_per_token": round(int(step.sum()) / max(1, replayed.scheduled_tokens), 1),
        "gc_objects_per_step": round(replayed.gc_objects / len(step), 3),
        "allocs_per_step": round(replayed.allocations / len(step), 3) if _core.allocations() else None,
    }


def _replay(scheduler: Scheduler, arrivals: list[Arrival], *, speed: int, step_us: int) -> Replayed:
    """Submit each request when the virtual clock has reached its time, and step until all have ended."""
    answers = Answers.of(int(scheduler.config["max_num_seqs"]), np.random.default_rng(1))
    coming, replayed, now_us = deque(arrivals), Replayed(), 0
    longest = int(scheduler.config["max_model_len"])
    while coming or scheduler.num_running or scheduler.num_waiting:
        if not scheduler.num_running and not scheduler.num_waiting:
            now_us = max(now_us, coming[0].at_us // speed)
        while coming and coming[0].at_us // speed <= now_us:
            arrival = coming.popleft()
            if len(arrival.prompt) + arrival.output > longest:
                replayed.left_out += 1
                continue
            start = thread_time_ns()
            try:
                scheduler.submit(arrival.prompt, max_tokens=arrival.output, now_us=now_us)
            except NeverFitsError:
                replayed.left_out += 1
                continue
            replayed.submit_ns.append(thread_time_ns() - start)
        objects, allocations = gc.get_count()[0], _core.allocations()
        start = thread_time_ns()
        plan = scheduler.plan(now_us)
        spent = thread_time_ns() - start
        replayed.outgrown += int((plan.ended[:, 1] == _core.END_ABORTED_CAPACITY).sum())
        if plan.num_seqs == 0:
            continue
        now_us += step_us
        wanted = len(plan.sample_rows)
        ids, starts = answers.of_step(plan.step)[:wanted], answers.starts[: wanted + 1]
        start = thread_time_ns()
        scheduler.commit(plan.step, ids, starts, now_us)
        replayed.step_ns.append(spent + thread_time_ns() - start)
        replayed.gc_objects += gc.get_count()[0] - objects
        replayed.allocations += _core.allocations() - allocations
        replayed.running_sum += plan.num_seqs
        replayed.scheduled_tokens += plan.num_tokens
    scheduler.plan(now_us)  # takes note of the last ends; nothing is left to run
    return replayed


def _check_drained(scheduler: Scheduler, stats: dict[str, int], *, expected: int) -> None:
    scheduler.audit()
    check(holds=stats["finished"] == expected, what=f"{expected} requests finish, found {stats['finished']}")
    check(holds=stats["used_blocks"] == 0, what=f"no block is held at the end, found {stats['used_blocks']}")
