"""Times `Scheduler.plan` and `Scheduler.commit` through Python, the model replaced by random ids.

Before: `blocktable bench scheduler`. After: one row per case. Prefix caching on, blocks of 16 tokens, prompts of 513 to
528 tokens, new ids every step from an int64 buffer; thread CPU time, with wall time beside it.
"""

import argparse
import gc
import json
import sys
from collections.abc import Iterator
from dataclasses import asdict, replace
from itertools import product

import numpy as np

from .clock import clock_cost_ns, floor_samples, quantiles_us
from .command import count, count_or_zero
from .episode import LEAST_ROWS_TO_AGE, Case, Episode, Timing
from .overlap import overlap_rows
from .row import Row, read_peer_rows, with_peers

SUMMARY = """Plan and commit decode steps: us a step, with their tail, and what the step allocates.

case      steady: every sequence gets one token, nobody comes or goes
          head_retried: rows are free, but the first of the waiting does not fit and is tried again each step
          turnover: one finish and one admission (a prompt of 513 tokens) a step
          expiries: rows are all taken, and 100 of the waiting pass their queue deadline in every step, as many as arrive;
          with 100 waiting, all do that came before the step: what 10,000 add is the difference
          arrivals: the same arrivals, and 100 of the waiting are aborted between two steps: what expiries cost beside them
policy    fcfs, priority (5 of them), fair (16 tenants), deadline, prefix (all waiting are cold)
pool      fresh, or aged: full of cached content, its free queue shuffled
phase     spread: every step 1/16 of the sequences need a new block; aligned: all need it in the same step
gap_ms    a pause before each step, which lets the caches go cold
--overlap whole steps beside a model of 10 ms on a thread of its own: period_us from commit to commit, by the wall clock
floor_us  an empty loop with the same median: what the machine itself adds to the tail

Times are CPU time of the thread (one reading costs clock_ns); wall_step_us is wall time. Without options a small set of
rows is run; with any of the options that name rows, all their combinations. A quantile that has too few steps behind it
is null: p9999 needs --steps 10000. allocs_per_step is null in a build that does not count.
--long     100,000 steps a row, in stretches as long as the pool can hold"""

TABLE = (
    "running", "waiting", "case", "overlap_depth", "period_us_p50", "period_us_p99", "policy", "pool", "phase", "gap_ms",
    "plan_us_p50",
    "commit_us_p50", "step_us_p50", "step_us_p99",
    "step_us_p999", "step_us_max", "wall_step_us_p50", "floor_us_p99", "floor_us_p999", "ns_per_seq", "finishes_per_step",
    "gc_objects_per_step", "allocs_per_step", "peer", "peer_step_us_p50", "ratio_step_us_p50",
)  # fmt: skip
"""Columns of the table for people; the JSON lines have all."""


STEPS, LONG_STEPS = 2560, 100_000
POLICIES = ("fcfs", "priority", "fair", "deadline", "prefix")

DEFAULT_SET = (
    Case(1),
    Case(32),
    Case(256),
    Case(1024),
    Case(1024, pool="aged"),
    Case(1024, phase="aligned"),
    Case(1024, waiting=10_000),
    Case(1024, waiting=10_000, case="head_retried"),
    Case(1024, case="turnover"),
    Case(1024, waiting=10_000, case="turnover"),
    Case(1024, waiting=100, case="expiries"),
    Case(1024, waiting=10_000, case="expiries"),
    Case(1024, waiting=10_000, case="arrivals"),
    *(Case(1024, waiting=10_000, policy=policy) for policy in POLICIES[1:]),
    Case(1024, gap_ms=10),
)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Which rows, and how long."""
    parser.add_argument("--running", type=count, nargs="+", help="sequences that decode (1 32 256 1024 8192)")
    parser.add_argument("--waiting", type=count_or_zero, nargs="+", help="requests that wait behind them (0 10000)")
    parser.add_argument("--case", choices=["steady", "head_retried", "turnover", "expiries", "arrivals"], nargs="+")
    parser.add_argument("--policy", choices=POLICIES, nargs="+")
    parser.add_argument("--pool", choices=["fresh", "aged"], nargs="+")
    parser.add_argument("--phase", choices=["spread", "aligned"], nargs="+")
    parser.add_argument("--gap-ms", type=count_or_zero, nargs="+", help="pause before each step (0 10)")
    parser.add_argument("--blocks", type=count, default=1_000_000, help="pool size (1M); head_retried makes its own small one")
    parser.add_argument("--samples", metavar="FILE", help="append every step's time to this file, one JSON line a row")
    parser.add_argument("--overlap", action="store_true", help="beside a model of 10 ms on a thread of its own, depth 1 and 2")
    parser.add_argument("--steps", type=count, help="steps timed per row (2560, with --long 100k), a tenth with a pause")
    parser.add_argument("--long", action="store_true", help="100k steps a row, begun anew only when the pool is used up")


def rows(options: argparse.Namespace) -> Iterator[Row]:
    """One row per case."""
    peers = [row for row in read_peer_rows(options.peer_json) if row.get("caching", True)]
    options.steps = options.steps or (LONG_STEPS if options.long else STEPS)
    steps, blocks = (64, 20_000) if options.smoke else (options.steps, options.blocks)
    if options.overlap:
        for running in options.running or [8 if options.smoke else 1024]:
            yield from overlap_rows(running, 16 if options.smoke else min(options.steps, 1000))
        return
    for case in _cases(options):
        if case.case in ("head_retried", "expiries", "arrivals") and case.waiting == 0:
            print(f"left out, nobody waits: {case}", file=sys.stderr)
            continue
        if case.pool == "aged" and case.waiting and case.running < LEAST_ROWS_TO_AGE:
            print(f"left out, a pool does not age with fewer than {LEAST_ROWS_TO_AGE} sequences: {case}", file=sys.stderr)
            continue
        steps_of_row = max(64, steps // 10) if case.gap_ms else steps
        row = _row(case, blocks, steps_of_row, options.samples, is_long=options.long)
        steady = case.case == "steady" and case.waiting == 0 and case.gap_ms == 0
        yield with_peers(row, peers, ["running"], ["step_us_p50", "step_us_p99", "ns_per_seq"]) if steady else row


def _cases(options: argparse.Namespace) -> list[Case]:
    """Every combination of what was named; what was not named has its first value. Nothing named: the default set."""
    named = {
        name: values
        for name in ("running", "waiting", "case", "policy", "pool", "phase", "gap_ms")
        if (values := getattr(options, name)) is not None
    }
    if not named:
        smoke: tuple[Case, ...] = (
            Case(1),
            Case(32),
            Case(32, waiting=50, case="head_retried"),
            Case(32, case="turnover"),
            Case(32, pool="aged"),
            Case(32, waiting=200, case="arrivals"),
        )
        smoke += tuple(Case(32, waiting=200, case="expiries", policy=policy) for policy in POLICIES)
        return list(smoke if options.smoke else DEFAULT_SET)
    return [replace(Case(1024), **dict(zip(named, values))) for values in product(*named.values())]


def _row(case: Case, blocks: int, steps: int, samples: str | None, *, is_long: bool) -> Row:
    episode = Episode(case, num_blocks=blocks, rng=np.random.default_rng(0), is_long=is_long)
    episode.check_answers()
    gc.collect()
    gc.freeze()
    try:
        timing = episode.time_steps(steps)
        made = episode.count_made(min(256, steps))
    finally:
        gc.unfreeze()
    episode.check_drained()
    if samples is not None:
        with open(samples, "a", encoding="utf-8") as file:
            print(json.dumps({**asdict(case), "step_ns": (timing.plan_ns + timing.commit_ns).tolist()}), file=file)
    keys: Row = {"bench": "scheduler", **asdict(case), "blocks": episode.num_blocks, "steps": steps}
    return keys | _figures(timing, case.running) | made


def _figures(timing: Timing, running: int) -> Row:
    step = timing.plan_ns + timing.commit_ns
    p50_ns = int(np.median(step))
    return {
        **quantiles_us("plan", timing.plan_ns),
        **quantiles_us("commit", timing.commit_ns),
        **quantiles_us("step", step),
        **quantiles_us("wall_step", timing.wall_ns),
        **quantiles_us("floor", floor_samples(p50_ns, len(step))),
        "clock_ns": clock_cost_ns(),
        "ns_per_seq": round(p50_ns / running, 1),
        "finishes_per_step": round(timing.finishes / len(step), 4),
    }
