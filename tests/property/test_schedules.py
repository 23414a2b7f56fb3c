"""Exactness of the scheduler over random schedules: every answer of the oracle model equals the cold one, and all drains clean.

The seeds begin at the session's seed. `BLOCKTABLE_SCHEDULES=N` plays N schedules instead of the usual number.
"""

import os
import time
from collections import Counter

import pytest

from blocktable import _core
from blocktable.errors import AuditError, StalledError
from blocktable.testing import Report, case_of, run_schedule
from tests.faults.promises import is_panic

SCHEDULES = int(os.environ.get("BLOCKTABLE_SCHEDULES", "600"))
"""1,000 take about half a minute of one core."""
SOAK_SCHEDULES = max(40_000, SCHEDULES)
"""More find more."""

MUST_HAPPEN = ("refused", "aborted", "ended_for_capacity", "expired", "preemptions", "failed_steps", "cached_tokens")


@pytest.mark.timeout(0)  # long if it was asked to be
def test_every_answer_in_random_schedules_is_the_cold_answer(seed: int, capsys: pytest.CaptureFixture[str]) -> None:
    """Arrivals, aborts in every state, failed steps, stops, resets, refused calls, pools of a few blocks; all audited."""
    _play(range(seed, seed + SCHEDULES), capsys)


@pytest.mark.timeout(0)
def test_every_answer_is_the_cold_one_with_two_steps_in_flight(seed: int, capsys: pytest.CaptureFixture[str]) -> None:
    """The same schedules for a caller that plans ahead."""
    _play(range(seed, seed + SCHEDULES // 4), capsys, overlap_depth=2)


@pytest.mark.slow
@pytest.mark.timeout(0)
def test_every_answer_in_very_many_random_schedules_is_the_cold_answer(seed: int, capsys: pytest.CaptureFixture[str]) -> None:
    """The same with other seeds, for the soak."""
    _play(range(seed + SCHEDULES, seed + SCHEDULES + SOAK_SCHEDULES), capsys)


def _play(seeds: range, capsys: pytest.CaptureFixture[str], *, overlap_depth: int = 1) -> None:
    start, totals = time.monotonic(), Counter[str]()
    for number in seeds:
        _add(totals, run_schedule(number, overlap_depth=overlap_depth))
    with capsys.disabled():
        seconds = time.monotonic() - start
        print(f"\n  {len(seeds)} schedules, seeds {seeds[0]}..{seeds[-1]}, {seconds:.0f} s: {dict(totals)}")
    missing = [name for name in MUST_HAPPEN if not totals[name]]
    assert not missing or len(seeds) < 500, f"never met: {missing}"


def _add(totals: Counter[str], report: Report) -> None:
    for name in (
        "steps",
        "submitted",
        "refused",
        "finished",
        "aborted",
        "ended_for_capacity",
        "expired",
        "preemptions",
        "failed_steps",
        "cached_tokens",
    ):
        totals[name] += getattr(report, name)


@pytest.mark.parametrize("number", range(8))
def test_the_same_seed_gives_the_same_plans_bit_for_bit(seed: int, number: int) -> None:
    """No decision depends on time, on chance, or on the order of a hash map; watching changes nothing either."""
    first = run_schedule(seed + number)
    assert run_schedule(seed + number) == first
    assert run_schedule(seed + number, recounts=False) == first


def test_different_seeds_give_different_cases() -> None:
    """The control of the test above."""
    assert len({run_schedule(seed).digest for seed in range(20)}) == 20
    assert len({str(case_of(seed).config) for seed in range(200)}) > 150


CAN_BE_SEEN = (
    "leak_block_on_finish", "lost_block", "double_free", "one_way_link", "grow_from_zero", "blocked_keeps_hits",
    "skip_ref_on_hit", "hit_keeps_in_queue", "keep_key_on_reuse", "publish_at_plan", "publish_partial",
    "hit_whole_prompt", "stale_hit", "no_rollback_on_fail", "keep_pending_on_fail", "keep_pending_on_abort",
    "sharer_not_reset", "free_in_flight", "apply_stale_result", "preempt_equal", "admit_after_preempt", "no_never_fits",
    "null_usable", "never_ends_alone", "tail_lost_on_preempt", "min_tokens_ignored", "abort_waiting_leaks",
    "write_shared", "dirty_missing", "short_slot", "recount_queries_on_retry", "preempted_to_tail", "ignore_promises",
    "orphan_entry", "stall_silently", "count_one_too_many", "key_without_parent", "free_in_sight", "window_never_freed",
    "entry_keeps_name", "null_not_told", "short_window_hit", "first_group_decides", "one_key_for_all_groups",
    "slots_of_first_group", "need_of_one_group", "no_ageing", "watermark_usable", "quota_not_asked", "quota_exceeded",
    "promise_only_known", "never_expires", "worn_unsecured", "secured_taken",
)  # fmt: skip
"""Planted faults of the scheduler that make a wrong answer, a wrong count or a stall without forks and domains. The others
(orders, costs, keys, events, forks, tables without a scheduler) are met by tests of their own."""


SEEN_LATE = {"double_free": 140, "secured_taken": 470}
"""Faults that few schedules meet: where to look first."""

SEEN_AHEAD = ("leases_end_together", "wasted_token_shown", "key_before_token", "fail_leaves_next", "worn_unsecured")
"""Planted faults of planning ahead, and one of every depth."""


@pytest.mark.mutant
@pytest.mark.parametrize("mutant", SEEN_AHEAD)
def test_random_schedules_that_plan_ahead_find_planted_faults(mutant: str) -> None:
    """The same control for two steps in flight."""
    _demand_found(mutant, overlap_depth=2)


@pytest.mark.mutant
@pytest.mark.parametrize("mutant", CAN_BE_SEEN)
def test_random_schedules_find_planted_faults(mutant: str) -> None:
    """The control: a search through few schedules meets each fault that can be seen at all. It may meet it as a panic."""
    _demand_found(mutant, overlap_depth=1)


def _demand_found(mutant: str, *, overlap_depth: int) -> None:
    _core.set_mutant(mutant)
    try:
        first = SEEN_LATE.get(mutant, 0)
        for seed in (*range(first, 600), *range(first)):
            try:
                run_schedule(seed, overlap_depth=overlap_depth)
            except (AssertionError, AuditError, StalledError) as error:
                print(f"{mutant}: schedule {seed}: {error}")
                return
            except BaseException as error:
                if not is_panic(error):
                    raise
                print(f"{mutant}: schedule {seed}: panic: {error}")
                return
    finally:
        _core.set_mutant(None)
    pytest.fail(f"{mutant} was not noticed in 600 schedules")
