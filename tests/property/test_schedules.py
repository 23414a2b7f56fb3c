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

SCHEDULES = int(os.environ.get("BLOCKTABLE_SCHEDULES", "2000"))
"""2,000 take about a minute of one core. More find more: a soak plays twenty times as many."""

MUST_HAPPEN = ("refused", "aborted", "ended_for_capacity", "preemptions", "failed_steps", "cached_tokens")


@pytest.mark.timeout(0)  # long if it was asked to be
def test_every_answer_in_random_schedules_is_the_cold_answer(seed: int, capsys: pytest.CaptureFixture[str]) -> None:
    """Arrivals, aborts in every state, failed steps, stops, resets, refused calls, pools of a few blocks; all audited."""
    _play(range(seed, seed + SCHEDULES), capsys)


@pytest.mark.slow
@pytest.mark.timeout(0)
def test_every_answer_in_very_many_random_schedules_is_the_cold_answer(seed: int, capsys: pytest.CaptureFixture[str]) -> None:
    """The same with other seeds, for the soak."""
    _play(range(seed + SCHEDULES, seed + 21 * SCHEDULES), capsys)


def _play(seeds: range, capsys: pytest.CaptureFixture[str]) -> None:
    start, totals = time.monotonic(), Counter[str]()
    for number in seeds:
        _add(totals, run_schedule(number))
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


ONLY_ORDER = {"free_queue_skips_one", "head_order", "forward_order", "unpublished_to_tail"}
ONLY_COST = {"budget_before_hit", "no_budget_for_decodes", "no_prefix_wait", "preempt_self", "preempt_two"}
OUT_OF_REACH = {"partial_take"}  # the scheduler never asks the pool for more than is free
OF_THE_FACE = {
    "publish_unwritten", "publish_other_tokens", "release_keeps_seat", "reset_keeps_tables", "foreign_table_taken",
    "loose_drops_others", "clamp_negative",
}  # fmt: skip
"""Faults of `BlockPool` and its tables, which tests/border meets."""
OF_EVENTS = {name for name in _core.MUTANTS if name.startswith(("event_", "snapshot_"))}
OF_GROUPS = {"promise_unfreed", "put_back_blind", "put_back_to_start"}
"""Faults that need one certain scene; see tests/faults/test_groups.py."""
OF_FORKS = {
    "fork_misses_last", "truncate_keeps_block", "write_in_place", "copy_keeps_holder", "hit_stays_parked", "guard_keeps_block",
    "write_forked", "copy_row_short", "copy_without_lease", "failed_copy_counts", "fork_unconfirmed", "truncate_keeps_epoch",
}  # fmt: skip
"""Faults of forks and truncations, which the schedules of the Rust crate have."""
NOT_HERE = ONLY_ORDER | ONLY_COST | OUT_OF_REACH | OF_THE_FACE | OF_EVENTS | OF_GROUPS | OF_FORKS
CAN_BE_SEEN = sorted(set(_core.MUTANTS) - NOT_HERE)
"""Planted faults that make a wrong answer, a wrong count or a stall. The others have scenes of their own in tests/faults."""


@pytest.mark.mutant
@pytest.mark.parametrize("mutant", CAN_BE_SEEN)
def test_random_schedules_find_planted_faults(mutant: str) -> None:
    """The control: a search through few schedules meets each fault that can be seen at all. It may meet it as a panic."""
    _core.set_mutant(mutant)
    try:
        for seed in range(600):
            try:
                run_schedule(seed)
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
