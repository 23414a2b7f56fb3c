"""Ten thousand requests leave nothing behind: no block, no record, no memory."""

import gc

import numpy as np
import psutil
import pytest

from blocktable import AuditError, _core

ROUND = 8  # requests at once
WARM_UP = 2_000
REQUESTS = 10_000
SLACK_BYTES = 2_000_000
"""Less than 200 bytes a request, which any record kept for each would exceed."""


def run_requests(scheduler, count: int, rng: np.random.Generator) -> None:
    """Submit, run, and end `count` requests in each of the ways that a request can end."""
    bank, starts = rng.integers(0, 100, (31, 64)), np.arange(65)
    for _ in range(0, count, ROUND):
        lengths, fates = rng.integers(1, 40, ROUND).tolist(), rng.integers(0, 5, ROUND).tolist()
        live = [scheduler.submit(rng.integers(0, 100, length), max_tokens=4, stop_token_ids=[3]) for length in lengths]
        step = 0
        while (plan := scheduler.plan(0)).num_seqs:
            for request, fate in zip(live, fates):
                if fate == 0 and step == 1:
                    scheduler.abort(request)
                elif fate == 1 and step == 2:
                    scheduler.finish(request)
            if step == 1 and fates[0] == 2:
                scheduler.fail(plan.step)
            else:
                wanted = len(plan.sample_rows)
                scheduler.commit(plan.step, bank[plan.step % 31, :wanted], starts[: wanted + 1], 0)
            step += 1


def test_ten_thousand_requests_leave_no_block_and_no_memory(make_scheduler, seed):
    scheduler = make_scheduler()
    rng = np.random.default_rng(seed)
    run_requests(scheduler, WARM_UP, rng)
    gc.collect()
    process = psutil.Process()
    before = process.memory_info().rss
    for _ in range(5):
        run_requests(scheduler, REQUESTS // 5, rng)
        assert (scheduler.num_running, scheduler.num_waiting) == (0, 0)
        assert len(scheduler.free_queue()) == 63
        assert not scheduler.block_refs()[1:].any()
        scheduler.audit()
    gc.collect()
    grown = process.memory_info().rss - before
    assert grown < SLACK_BYTES, f"{grown:,} bytes more after {REQUESTS:,} requests"


@pytest.mark.mutant
def test_a_planted_leak_of_one_block_a_request_is_found(make_scheduler, seed):
    """The check above can fail."""
    scheduler = make_scheduler()
    _core.set_mutant("leak_block_on_finish")
    try:
        run_requests(scheduler, ROUND, np.random.default_rng(seed))
    finally:
        _core.set_mutant(None)
    assert len(scheduler.free_queue()) < 63
    with pytest.raises(AuditError):
        scheduler.audit()


def test_schedulers_give_their_memory_back(make_scheduler):
    """Each of these holds some 10 MB; a hundred of them at once would show."""

    def make_and_drop() -> None:
        scheduler = make_scheduler(num_blocks=100_000)
        scheduler.submit(list(range(50)), max_tokens=1)
        view = scheduler.plan(0).block_tables
        assert view.size
        del scheduler

    for _ in range(5):
        make_and_drop()
    gc.collect()
    process = psutil.Process()
    before = process.memory_info().rss
    for _ in range(100):
        make_and_drop()
    gc.collect()
    assert process.memory_info().rss - before < 50_000_000


def test_a_kept_view_keeps_its_memory_and_a_dropped_one_gives_it_back(make_scheduler):
    """The check above can fail: schedulers that are kept alive by a view are counted."""
    process = psutil.Process()
    gc.collect()
    before = process.memory_info().rss
    kept = []
    for _ in range(20):
        scheduler = make_scheduler(num_blocks=100_000)
        scheduler.submit(list(range(50)), max_tokens=1)
        kept.append((scheduler, scheduler.plan(0).block_tables))
        scheduler.free_queue()
    assert process.memory_info().rss - before > 20_000_000
