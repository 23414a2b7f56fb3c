"""The host's part of a decode step whose model runs on a device: plan, inputs, launch and commit.

Before: there is a runner over a pool. After: microseconds of each part. Always: no time of the device counts: it has nothing to
do when a part begins, and is awaited between the parts; what is committed is made up, since nobody reads it.
"""

from __future__ import annotations

from collections.abc import Callable
from statistics import median
from time import perf_counter_ns
from typing import TYPE_CHECKING

import numpy as np

from .._core import Scheduler
from .row import check

if TYPE_CHECKING:
    from ..model.runner import ModelRunner

PROMPTS_A_STEP = 16384
"""Tokens; prompts are planned and not computed."""


def host_step(
    runner: ModelRunner, *, batch: int, context: int, block_size: int, vocab_size: int, steps: int, wait: Callable[[], None]
) -> dict[str, float]:
    """Medians over `steps` steps of `batch` sequences of `context` positions and more, and of their sums: us.

    `wait` returns when the device has done all that it was told. The runner's pool must have `blocks_for` blocks.
    """
    scheduler = Scheduler(
        num_blocks=blocks_for(batch, context, block_size, steps),
        block_size=block_size,
        vocab_size=vocab_size,
        max_model_len=context + 2 * steps + 2,
        max_num_seqs=batch,
        max_num_batched_tokens=PROMPTS_A_STEP,
    )
    draw = np.random.default_rng(0)
    for _ in range(batch):
        scheduler.submit(draw.integers(0, vocab_size, context), max_tokens=2 * steps + 2, now_us=0)
    took: list[tuple[int, int, int]] = []
    while len(took) < steps + 1:
        begun = perf_counter_ns()
        plan = scheduler.plan(now_us=0)
        planned = perf_counter_ns()
        is_decode = plan.num_tokens == plan.num_seqs == batch
        if is_decode:
            scores = tuple(runner.forward(plan).shape)
            check(holds=scores == (batch, vocab_size), what=f"a step scored {scores}, not a row for each of {batch} sequences")
        launched = perf_counter_ns()
        wait()
        ids, starts = draw.integers(0, vocab_size, len(plan.sample_rows)), np.arange(len(plan.sample_rows) + 1)
        awaited = perf_counter_ns()
        scheduler.commit(plan.step, ids, starts, now_us=0)
        if is_decode:
            took.append((planned - begun, launched - planned, perf_counter_ns() - awaited))
    parts = took[1:]  # the first one captures
    named = {name: median(part) for name, part in zip(("plan_us", "forward_us", "commit_us"), zip(*parts))}
    return {name: round(ns / 1000, 1) for name, ns in (named | {"us": median(map(sum, parts))}).items()}


def blocks_for(batch: int, context: int, block_size: int, steps: int) -> int:
    """Blocks that these steps need, with the null block."""
    return 1 + batch * (-(-(context + 2 * steps + 2) // block_size) + 1)
