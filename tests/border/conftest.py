"""Owns the small scheduler that the tests of the border drive, and the steps they take with it."""

from collections.abc import Callable

import numpy as np
import pytest

from blocktable import Commit, Plan, Scheduler

SMALL = {
    "num_blocks": 64,
    "block_size": 4,
    "vocab_size": 100,
    "max_model_len": 128,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 64,
}

MakeScheduler = Callable[..., Scheduler]


@pytest.fixture
def make_scheduler() -> MakeScheduler:
    """A scheduler of 64 blocks of 4 tokens and a vocabulary of 100; keywords change that."""
    return lambda **changes: Scheduler(**(SMALL | changes))


@pytest.fixture
def scheduler(make_scheduler: MakeScheduler) -> Scheduler:
    """The small scheduler as it is."""
    return make_scheduler()


@pytest.fixture
def answer() -> Callable[[Scheduler, Plan], Commit]:
    """Commit a plan with the id 7 for every entry of `sample_rows`."""

    def commit(scheduler: Scheduler, plan: Plan) -> Commit:
        wanted = len(plan.sample_rows)
        return scheduler.commit(plan.step, np.full(wanted, 7, np.int64), np.arange(wanted + 1, dtype=np.int64), 0)

    return commit
