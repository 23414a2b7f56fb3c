"""Owns the load that benchmarks put on a scheduler: prompts, new ids every step, and a pool that has seen use.

Before: `prefix.py` and `scheduler.py` say how large. After: a `Scheduler` in a known state. Everything random comes from
one seed; ids are int64, as a sampler on a device gives them.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .._core import Commit, Plan, Scheduler
from .row import check

BLOCK_SIZE = 16
VOCAB_SIZE = 32_000

Ids = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Answers:
    """What the model would answer: for each step another row of random ids, one per sequence."""

    bank: Ids  # [steps before they repeat, sequences]
    starts: Ids  # [sequences + 1] 0, 1, 2, …: every entry of `sample_rows` gets one id

    @staticmethod
    def of(num_seqs: int, rng: np.random.Generator) -> "Answers":
        """For at most `num_seqs` sequences a step."""
        return Answers(rng.integers(0, VOCAB_SIZE, (61, num_seqs)), np.arange(num_seqs + 1))

    def commit(self, scheduler: Scheduler, plan: Plan) -> Commit:
        """Answer every entry of `plan.sample_rows`."""
        wanted = len(plan.sample_rows)
        return scheduler.commit(plan.step, self.of_step(plan.step)[:wanted], self.starts[: wanted + 1], 0)

    def of_step(self, step: int) -> Ids:
        """[sequences] ids of step `step`."""
        row: Ids = self.bank[step % len(self.bank)]
        return row


def prompt_rows(count: int, tokens: int, rng: np.random.Generator) -> Ids:
    """[count, tokens] random prompts."""
    return rng.integers(0, VOCAB_SIZE, (count, tokens))


def run_to_end(scheduler: Scheduler, request: int) -> None:
    """Step until `request` has ended; every sequence gets random ids."""
    answers = Answers.of(int(scheduler.config["max_num_seqs"]), np.random.default_rng(request))
    while True:
        plan = scheduler.plan(0)
        check(holds=plan.num_seqs > 0, what=f"request {request} runs until it ends")
        if request in answers.commit(scheduler, plan).ended[:, 0]:
            return


def age(scheduler: Scheduler, rng: np.random.Generator, *, passes: int = 2) -> None:
    """Fill the whole pool with cached content and shuffle its free queue, by running random requests through it.

    All rows decode side by side, so that the blocks of one request lie far apart, and they end in random order; the
    second pass does it on what the first left, which makes neighbours in the queue strangers in memory.
    """
    blocks, rows = int(scheduler.config["num_blocks"]), int(scheduler.config["max_num_seqs"])
    answers = Answers.of(rows, rng)
    chain = max(2, min(64, blocks // (4 * rows)))  # blocks a request, on average
    to_fill = passes * blocks
    while True:
        if to_fill > 0 and scheduler.num_waiting < rows:
            to_fill -= _submit_short(scheduler, rows, chain, rng)
        plan = scheduler.plan(0)
        if plan.num_seqs == 0:
            break
        answers.commit(scheduler, plan)
    _check_aged(scheduler, blocks)


def _submit_short(scheduler: Scheduler, count: int, chain: int, rng: np.random.Generator) -> int:
    """Queue `count` requests of 1 to 16 prompt tokens that fill about `chain` blocks each; returns the blocks in all."""
    prompts = prompt_rows(count, BLOCK_SIZE, rng)
    lengths = rng.integers(1, BLOCK_SIZE + 1, count).tolist()
    outputs = rng.integers(chain * BLOCK_SIZE // 2, chain * BLOCK_SIZE * 3 // 2, count).tolist()
    for prompt, length, output in zip(prompts, lengths, outputs):
        scheduler.submit(prompt[:length], max_tokens=output)
    return int(sum(outputs)) // BLOCK_SIZE


def _check_aged(scheduler: Scheduler, blocks: int) -> None:
    queue = scheduler.free_queue()
    neighbours = float(np.mean(np.abs(np.diff(queue)) <= 4))
    published = len(scheduler.published_blocks()) / blocks
    check(holds=published > 0.8, what=f"an aged pool is full of cached content, {published:.0%} is")
    check(holds=neighbours < 0.3, what=f"an aged pool's queue is shuffled, {neighbours:.0%} of its neighbours lie side by side")
