"""The core's door (catalogue 100, 104, 119, 121, 133): bad calls are refused by type; arrays and counters hold."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from blocktable import _core
from blocktable._core import Scheduler
from blocktable.errors import (
    InvalidInputError,
    QueueFullError,
    StepInFlightError,
    UnknownRequestError,
    WrongStepError,
)
from blocktable.testing import REFUSALS, Snapshot
from blocktable.testing import driver as scene_driver
from tests.faults.planted import (
    AbortSaysYes,
    ClampsWhatIsBad,
    CountsNoLoss,
    EndsAnyStep,
    NoLimitOfTheLine,
    RefusedCommitEndsTheStep,
    TellsEndsOnce,
)
from tests.faults.promises import Promises
from tests.faults.scene import VOCAB_SIZE, prompt, scene

PROMISES = Promises()

BAD_SUBMITS: dict[str, dict[str, Any]] = {
    "prompt_len, empty": {"token_ids": []},
    "prompt_len, too long": {"token_ids": [1] * 512},
    "token_ids, negative": {"token_ids": [1, -1]},
    "token_ids, at vocab_size": {"token_ids": [VOCAB_SIZE]},
    "token_ids, 2**31": {"token_ids": [2**31]},
    "token_ids, 2**63": {"token_ids": [2**63]},
    "token_ids, floats": {"token_ids": np.array([1.0, 2.0])},
    "token_ids, two-dimensional": {"token_ids": np.zeros((2, 2), np.int64)},
    "max_tokens, 0": {"max_tokens": 0},
    "max_tokens, -1": {"max_tokens": -1},
    "max_tokens, 2**63": {"max_tokens": 2**63},
    "min_tokens, -1": {"min_tokens": -1},
    "min_tokens, above max_tokens": {"min_tokens": 5},
    "stop_token_ids, at vocab_size": {"stop_token_ids": [VOCAB_SIZE]},
    "stop_token_ids, -1": {"stop_token_ids": [-1]},
}


@PROMISES.row(119, 121, planted=(ClampsWhatIsBad,))
def test_a_bad_request_is_refused_by_its_field_and_changes_nothing() -> None:
    """Faults 119, 121: the error names the field; a good request in the same moment is answered right."""
    driver = scene()
    good = driver.submit(prompt(1, 9), max_tokens=3)
    before = Snapshot.of(driver.scheduler)
    for case, changes in BAD_SUBMITS.items():
        arguments: dict[str, Any] = {"token_ids": prompt(2, 3), "max_tokens": 4} | changes
        with pytest.raises(InvalidInputError) as refusal:
            driver.scheduler.submit(arguments.pop("token_ids"), **arguments)
        assert refusal.value.field == case.split(",")[0], case
        before.check_unchanged(driver.scheduler, except_for=REFUSALS)
    driver.drain()
    assert len(good.outputs) == 3


@PROMISES.row(121, planted=(ClampsWhatIsBad,))
def test_a_huge_limit_is_a_bound_and_no_allocation() -> None:
    """Fault 121: max_tokens beyond all memory is taken, and costs nothing before it is used; past its type it is refused."""
    driver = scene()
    for value in (1 << 20, (1 << 31) - 1, (1 << 32) - 1):
        request = driver.submit(prompt(1, 9), max_tokens=value)
        driver.step()
        assert len(request.outputs) == 1
        driver.abort(request)
    for value in (1 << 32, 1 << 63, 1 << 64, 10**308):
        with pytest.raises(InvalidInputError, match="max_tokens"):
            driver.submit(prompt(1, 9), max_tokens=value)
    driver.drain()


@PROMISES.row(planted=(NoLimitOfTheLine,))
def test_a_full_waiting_line_refuses_with_its_limit() -> None:
    """Design 11: the line is bounded; a refused request leaves no trace, and the line moves on."""
    driver = scene(max_waiting=3)
    for number in range(3):
        driver.submit(prompt(number, 5), max_tokens=2)
    before = Snapshot.of(driver.scheduler)
    with pytest.raises(QueueFullError) as refusal:
        driver.submit(prompt(9, 5), max_tokens=2)
    assert refusal.value.limit == 3
    before.check_unchanged(driver.scheduler, except_for=REFUSALS)
    driver.step()
    driver.submit(prompt(9, 5), max_tokens=2)
    driver.drain()


def _bad_commits(step: int, count: int) -> dict[str, tuple[type[Exception], Callable[[Scheduler], object]]]:
    ids, starts = np.ones(count, np.int64), np.arange(count + 1, dtype=np.int64)

    def commit(number: int = step, ids: Any = ids, starts: Any = starts) -> Callable[[Scheduler], object]:
        return lambda scheduler: scheduler.commit(number, ids, starts, 0)

    bad = InvalidInputError
    every_second = np.ones(2 * count, np.int64)[::2]
    return {
        "a later step": (WrongStepError, commit(step + 1)),
        "an earlier step": (WrongStepError, commit(step - 1 if step else step + 2)),
        "failing another step": (WrongStepError, lambda scheduler: scheduler.fail(step + 1)),
        "planning again": (StepInFlightError, lambda scheduler: scheduler.plan(0)),
        "too few starts": (bad, commit(starts=starts[:-1])),
        "too many starts": (bad, commit(starts=np.arange(count + 2))),
        "no starts": (bad, commit(starts=starts[:0])),
        "starts from 1": (bad, commit(starts=starts + 1)),
        "starts past the ids": (bad, commit(ids=ids[:-1])),
        "ids past the starts": (bad, commit(ids=np.ones(count + 1, np.int64))),
        "two tokens for one entry": (bad, commit(ids=np.ones(2 * count, np.int64), starts=2 * starts)),
        "falling starts": (bad, commit(starts=starts[::-1].copy())),
        "an id at vocab_size": (bad, commit(ids=ids * VOCAB_SIZE)),
        "a negative id": (bad, commit(ids=-ids)),
        "one bad id of several": (bad, commit(ids=np.array([1] * (count - 1) + [-5]))),
        "float ids": (bad, commit(ids=ids.astype(np.float64))),
        "ids that are not contiguous": (bad, commit(ids=every_second)),
    }


@PROMISES.row(planted=(RefusedCommitEndsTheStep,))
def test_a_bad_commit_is_refused_and_changes_nothing() -> None:
    """Wrong step, wrong shapes, ids out of range, another count of samples: nothing moves, and the right commit still works."""
    driver = scene()
    for number in range(2):
        driver.submit(prompt(number, 5), max_tokens=3)
    driver.step()
    plan = driver.plan()
    before = Snapshot.of(driver.scheduler)
    for case, (kind, call) in _bad_commits(plan.step, len(plan.sample_rows)).items():
        print(case)  # shown with a failure
        with pytest.raises(kind):
            call(driver.scheduler)
        before.check_unchanged(driver.scheduler)
    driver.commit(*driver.forward())
    driver.drain()


@PROMISES.row(mutants=("count_one_too_many",))
def test_commit_takes_32_and_64_bit_arrays_and_entries_without_a_token() -> None:
    """CSR: an entry may bring no token; the sequence then asks for the same one again."""
    driver = scene()
    request = driver.submit(prompt(1, 5), max_tokens=3)
    driver.plan()
    driver.forward()
    driver.commit(np.zeros(0, np.int32), np.zeros(2, np.int32))
    plan = driver.plan()
    assert plan.sample_requests.tolist() == [request.id]
    ids, starts = driver.forward()
    driver.commit(ids.astype(np.int32), starts.astype(np.int32))
    driver.drain()


@PROMISES.row(planted=(EndsAnyStep,))
def test_what_is_not_in_flight_can_be_neither_committed_nor_failed() -> None:
    """Nothing planned, or a plan that runs nothing: there is no step to end."""
    driver = scene()
    for call in (
        lambda: driver.scheduler.commit(0, np.zeros(0, np.int64), np.zeros(1, np.int64), 0),
        lambda: driver.scheduler.fail(0),
    ):
        before = Snapshot.of(driver.scheduler)
        with pytest.raises(WrongStepError):
            call()
        before.check_unchanged(driver.scheduler)
    driver.plan()
    with pytest.raises(WrongStepError):
        driver.scheduler.fail(driver.scheduler.plan(0).step)


@PROMISES.row(planted=(AbortSaysYes,))
def test_ids_that_never_were_are_refused_or_answered_with_false() -> None:
    """An id from nowhere ends nobody."""
    driver = scene()
    before = Snapshot.of(driver.scheduler)
    for number in (0, 1, 2**40):
        assert not driver.scheduler.abort(number)
        assert not driver.scheduler.finish(number)
        with pytest.raises(UnknownRequestError):
            driver.scheduler.num_cached_tokens(number)
    before.check_unchanged(driver.scheduler)


BAD_CONFIGS = (
    ("num_blocks", 0),
    ("num_blocks", 1),
    ("num_blocks", 2**31),
    ("block_size", 0),
    ("block_size", -1),
    ("vocab_size", 0),
    ("max_model_len", 0),
    ("max_num_seqs", 0),
    ("max_num_batched_tokens", 0),
    ("max_waiting", 0),
    ("long_prefill_threshold", -1),
)


@PROMISES.row(planted=(ClampsWhatIsBad,))
def test_a_bad_size_is_refused_by_its_name() -> None:
    """Every size of the constructor has a bound, and the error names the size."""
    for field, value in BAD_CONFIGS:
        with pytest.raises(InvalidInputError) as refusal:
            scene_driver.Scheduler(**(scene().config | {field: value}))
        assert refusal.value.field == field


@PROMISES.row(100, mutants=("short_slot", "dirty_missing"))
def test_slots_and_tables_are_right_when_the_blocks_are_in_no_order() -> None:
    """Fault 100: the pool is shuffled first; chunks of 6 cross borders of blocks of 4 everywhere."""
    driver = scene(usable=40, long_prefill_threshold=6)
    batch = [driver.submit(prompt(number, 9), max_tokens=1 + 2 * (number % 5)) for number in range(12)]
    driver.run()
    request = driver.submit(prompt(20, 45), max_tokens=9)
    plan = driver.plan()
    table = plan.block_tables[0, plan.seq_slots[0], :2].tolist()
    assert table[1] != table[0] + 1, "the control: neighbours in the table are none in memory"
    driver.commit(*driver.forward())
    driver.drain()
    assert len(request.outputs) == 9
    assert all(one.end == _core.END_FINISHED_LENGTH for one in batch)


@PROMISES.row(104, mutants=("count_one_too_many",))
def test_nothing_is_written_at_or_past_the_longest_length() -> None:
    """Fault 104: prompts up to one token below max_model_len; the last output is not written, positions end at the limit."""
    for length in (5, 13, 14, 15):
        driver = scene(max_model_len=16, usable=5)
        request = driver.submit(prompt(1, length), max_tokens=100)
        highest = 0
        while request.end is None:
            plan = driver.plan()
            highest = max(highest, int(plan.positions.max()))
            driver.commit(*driver.forward())
        assert len(request.outputs) == 16 - length
        assert highest == 14
        driver.drain()


@PROMISES.row(133, 134, mutants=("recount_queries_on_retry",))
def test_retries_and_preemptions_count_no_second_query() -> None:
    """Fault 133: prompts that share nothing, a pool that makes them retry: queries are the prompt tokens, hits are 0."""
    driver = scene(usable=9)
    requests = [driver.submit(prompt(number, 5 + number), max_tokens=9) for number in range(8)]
    driver.drain()
    stats = driver.scheduler.stats()
    assert stats["preemptions"] == sum(request.preempted for request in requests) > 0
    assert stats["prefix_queries"] == sum(len(request.prompt) for request in requests)
    assert stats["prefix_hits"] == 0
    assert stats["recomputed_tokens"] > 0


@PROMISES.row(133, planted=(CountsNoLoss,))
def test_tokens_that_are_given_up_are_counted_by_what_took_them() -> None:
    """One writes what three share. It fails with the prefix and four last tokens; sharers lose the prefix."""
    driver = scene(block_size=4)
    requests = [driver.submit([*prompt(1, 12), number], max_tokens=4) for number in range(4)]
    assert driver.plan().num_tokens == 12 + 4
    driver.fail()
    driver.run()
    assert all(request.outputs == request.answer.first(4) for request in requests)
    stats = driver.scheduler.stats()
    told = [record for request in requests for record in driver.scheduler.explain(request.id)["records"]]
    sums = {
        reason: sum(record["numbers"]["tokens"] for record in told if record["reason"] == reason)
        for reason in ("put_back", "step_failed")
    }
    assert (stats["put_back_tokens"], stats["failed_tokens"]) == (sums["put_back"], sums["step_failed"])
    assert stats["put_back_tokens"] > 0
    assert stats["failed_tokens"] > 0
    assert stats["recomputed_tokens"] == 0, "nobody was preempted"
    driver.drain()


@PROMISES.row(planted=(TellsEndsOnce,))
def test_more_ends_between_two_plans_than_can_wait_at_once_are_all_reported() -> None:
    """Requests that come and go between two plans, many times the length of the line: later plans tell the rest."""
    driver = scene(max_waiting=2, max_num_seqs=2)
    for number in range(300):
        driver.abort(driver.submit(prompt(number, 3), max_tokens=1))
    driver.drain()


test_a_planted_fault_is_caught = PROMISES.test_of_mutants()
test_a_fault_at_the_border_is_caught = PROMISES.test_of_planted()
