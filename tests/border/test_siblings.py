"""Several sequences in one request through Python: one prompt, first tokens from one row, ends as one and alone.

Before: `Scheduler.submit(n=...)`. After: plans tell the sequences as (request, number, row).
"""

import numpy as np
import pytest

from blocktable import InvalidInputError, Scheduler
from blocktable.testing.audit import check_drained

SIZES = {"num_blocks": 64, "block_size": 4, "vocab_size": 1009, "max_model_len": 80, "max_num_seqs": 4}


def step(scheduler: Scheduler) -> list[int]:
    """One step; for each of its samples the sequence that it belongs to."""
    plan = scheduler.plan(0)
    samples = plan.sample_requests.tolist()
    if plan.num_seqs:
        ids = np.arange(len(samples))
        scheduler.commit(plan.step, ids, np.arange(len(samples) + 1), 0)
    scheduler.audit()
    return samples


def test_three_sequences_begin_from_one_row_and_are_told_with_their_numbers() -> None:
    scheduler = Scheduler(**SIZES)
    request = scheduler.submit(list(range(10)), max_tokens=3, n=3)
    plan = scheduler.plan(0)
    assert plan.sample_rows.tolist() == [9, 9, 9]
    assert plan.sample_requests.tolist() == [request, request + 1, request + 2]
    assert plan.admitted[:, :2].tolist() == [[request, 0]]
    scheduler.commit(plan.step, np.array([5, 6, 7]), np.arange(4), 0)
    plan = scheduler.plan(0)
    assert plan.admitted[:, :2].tolist() == [[request, 1], [request, 2]]
    assert sorted(plan.token_ids.tolist()) == [5, 6, 7]
    assert plan.num_tokens == 3
    scheduler.commit(plan.step, np.array([8, 8, 8]), np.arange(4), 0)
    while step(scheduler):
        pass
    assert scheduler.stats()["scheduled_tokens"] == 10 + 3 * 2
    check_drained(scheduler)


def test_an_abort_ends_all_of_them_and_end_sequence_one() -> None:
    scheduler = Scheduler(**SIZES)
    request = scheduler.submit(list(range(10)), max_tokens=9, n=3)
    step(scheduler)
    assert scheduler.num_running == 3
    assert scheduler.end_sequence(request)
    assert not scheduler.end_sequence(request)
    assert step(scheduler) == [request + 1, request + 2]
    assert scheduler.abort(request)
    assert not scheduler.abort(request)
    assert step(scheduler) == []
    check_drained(scheduler)


@pytest.mark.parametrize("n", [0, 5, -1, 1.5, True])
def test_a_number_of_sequences_that_cannot_run_is_refused(n: object) -> None:
    scheduler = Scheduler(**SIZES)
    with pytest.raises(InvalidInputError) as refusal:
        scheduler.submit([1, 2], max_tokens=1, n=n)  # type: ignore[arg-type]
    assert refusal.value.field == "n"
    assert scheduler.num_waiting == 0
