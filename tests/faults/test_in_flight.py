"""In flight and cancelled (catalogue 67 to 80): what comes late is dropped, what leaves takes everything along."""

from collections.abc import Callable
from typing import Any

from blocktable import _core
from blocktable.testing import Driver, Request
from tests.faults.planted import AbortEndsAll, OneBufferForAll, ResultsBeforeAborts
from tests.faults.promises import Promises
from tests.faults.scene import prompt, scene

PROMISES = Promises()


@PROMISES.row(67, 79, planted=(ResultsBeforeAborts,))
def test_what_comes_back_for_a_request_that_left_is_dropped() -> None:
    """Faults 67, 79: abort between plan and result, in the last chunk and in the last output: aborted, and no token more."""
    for outputs_before in (0, 1, 3):
        driver = scene()
        leaver = driver.submit(prompt(1, 9), max_tokens=4)
        other = driver.submit(prompt(2, 9), max_tokens=6)
        for _ in range(outputs_before):
            driver.step()
        driver.plan()
        assert driver.abort(leaver)
        done = driver.commit(*driver.forward())
        assert (done.num_accepted, len(done.ended)) == (1, 0)
        assert leaver.end == _core.END_ABORTED
        assert len(leaver.outputs) == outputs_before
        driver.drain()
        assert len(other.outputs) == 6


@PROMISES.row(68, mutants=("free_in_flight",))
def test_blocks_that_a_step_in_flight_writes_are_not_free_before_it_ended() -> None:
    """Fault 68: abort in flight: the blocks are parked until the commit, or the failure, of that step."""
    for fails in (False, True):
        driver = scene(usable=8)
        leaver = driver.submit(prompt(1, 14), max_tokens=4)
        driver.plan()
        driver.abort(leaver)
        stats = driver.scheduler.stats()
        assert (stats["parked_blocks"], stats["free_blocks"], stats["used_blocks"]) == (4, 4, 0)
        if fails:
            driver.fail()
        else:
            driver.commit(*driver.forward())
        assert driver.scheduler.stats()["parked_blocks"] == 0
        driver.drain()


@PROMISES.row(70, mutants=("min_tokens_ignored", "tail_lost_on_preempt"))
def test_a_preemption_does_not_change_when_a_request_may_stop() -> None:
    """Fault 70: a stop token that comes up at output 3 and again later, min_tokens 5, with and without preemption."""
    for usable in (40, 6):
        driver = scene(usable=usable)
        driver.submit(prompt(1, 8), max_tokens=6)
        answer = driver.submit(prompt(2, 9), max_tokens=9).answer
        driver.run()
        driver = scene(usable=usable)
        driver.submit(prompt(1, 8), max_tokens=6)
        request = driver.submit(prompt(2, 9), max_tokens=9, min_tokens=5, stop_token_ids=[answer[2], answer[6]])
        driver.run()
        assert request.preempted == (usable == 6)
        assert (len(request.outputs), request.end) == (7, _core.END_FINISHED_STOP)
        driver.drain()


@PROMISES.row(71, mutants=("tail_lost_on_preempt",))
def test_a_preemption_after_any_output_changes_neither_text_nor_count() -> None:
    """Fault 71: the victim is preempted after k outputs, for many k: its tokens are right and max_tokens counts them all."""
    seen = set()
    for length in range(1, 14):
        driver = scene(usable=7)
        taker = driver.submit(prompt(1, length), max_tokens=22 - length)
        victim = driver.submit(prompt(2, 3), max_tokens=12)
        while victim.end is None:
            outputs, preempted = len(victim.outputs), victim.preempted
            driver.step()
            if victim.preempted > preempted:
                seen.add(outputs)
        assert len(victim.outputs) == 12
        assert taker.preempted == 0
        driver.drain()
    assert len(seen) >= 5, f"preempted after {sorted(seen)} outputs"


@PROMISES.row(76, mutants=("abort_waiting_leaks",), planted=(AbortEndsAll,))
def test_who_leaves_the_waiting_line_does_not_touch_who_runs() -> None:
    """Fault 76: A runs, B waits, B leaves: A is answered right, B never runs, and the line is empty."""
    driver = scene(max_num_seqs=1)
    running = driver.submit(prompt(1, 9), max_tokens=8)
    driver.step()
    waiting = driver.submit(prompt(2, 9), max_tokens=8)
    driver.abort(waiting)
    assert driver.scheduler.num_waiting == 0
    driver.run()
    assert len(running.outputs) == 8
    driver.drain()


def _waiting(driver: Driver) -> Request:
    driver.submit(prompt(1, 8), max_tokens=9)
    return driver.submit(prompt(2, 9), max_tokens=9)


def _waiting_with_a_hit(driver: Driver) -> Request:
    driver.generate(prompt(2, 13), max_tokens=1)
    driver.submit(prompt(1, 30), max_tokens=9)
    driver.step()
    request = driver.submit(prompt(2, 20), max_tokens=9)
    driver.step()
    assert request.row is None
    return request


def _waiting_for_a_prefix_in_flight(driver: Driver) -> Request:
    driver.submit(prompt(2, 28), max_tokens=3)
    driver.plan()
    request = driver.submit(prompt(2, 29), max_tokens=3)
    driver.commit(*driver.forward())
    driver.step()
    assert request.row is None
    return request


def _between_chunks(driver: Driver) -> Request:
    request = driver.submit(prompt(2, 28), max_tokens=3)
    driver.step()
    assert 0 < request.computed < 28
    return request


def _in_flight_in_a_chunk(driver: Driver) -> Request:
    request = _between_chunks(driver)
    driver.plan()
    return request


def _decoding(driver: Driver) -> Request:
    request = driver.submit(prompt(2, 7), max_tokens=9)
    driver.step()
    driver.step()
    assert len(request.outputs) == 2
    return request


def _in_flight_in_decode(driver: Driver) -> Request:
    request = _decoding(driver)
    driver.plan()
    return request


def _writer_with_sharers(driver: Driver) -> Request:
    request = driver.submit([*prompt(2, 4), 1], max_tokens=3)
    driver.submit([*prompt(2, 4), 2], max_tokens=3)
    driver.plan()
    return request


def _sharer(driver: Driver) -> Request:
    driver.submit([*prompt(2, 4), 1], max_tokens=3)
    request = driver.submit([*prompt(2, 4), 2], max_tokens=3)
    driver.plan()
    return request


def _after_a_failed_step(driver: Driver) -> Request:
    request = _in_flight_in_decode(driver)
    driver.fail()
    return request


def _preempted(driver: Driver) -> Request:
    driver.submit(prompt(1, 8), max_tokens=31)
    request = driver.submit(prompt(2, 5), max_tokens=20)
    while not request.preempted:
        driver.step()
    assert request.row is None
    return request


def _back_after_a_preemption(driver: Driver) -> Request:
    driver.submit(prompt(1, 8), max_tokens=26)
    request = driver.submit(prompt(2, 5), max_tokens=20)
    while not request.preempted or request.row is None:
        driver.step()
    return request


def _ended(driver: Driver) -> Request:
    return driver.generate(prompt(2, 5), max_tokens=2)


STATES: tuple[Callable[[Driver], Request], ...] = (
    _waiting,
    _waiting_with_a_hit,
    _waiting_for_a_prefix_in_flight,
    _between_chunks,
    _in_flight_in_a_chunk,
    _decoding,
    _in_flight_in_decode,
    _writer_with_sharers,
    _sharer,
    _after_a_failed_step,
    _preempted,
    _back_after_a_preemption,
    _ended,
)
"""Every state of a request, as the way to get there."""


def _end_in_every_state(end: str) -> None:
    for reach in STATES:
        for fails in (False, True):
            driver = scene(usable=10, max_num_batched_tokens=8)
            request = reach(driver)
            lived = request.end is None
            assert (driver.abort if end == "abort" else driver.finish)(request) == lived, reach.__name__
            if driver.plan_in_flight is not None:
                if fails:
                    driver.fail()
                else:
                    driver.commit(*driver.forward())
            driver.submit(prompt(2, 11), max_tokens=3)
            driver.drain(max_steps=200)


@PROMISES.row(
    74, 80, mutants=("abort_waiting_leaks", "free_in_flight", "keep_pending_on_abort", "sharer_not_reset", "apply_stale_result")
)
def test_a_request_can_be_aborted_in_every_state() -> None:
    """Faults 74, 80: it is over with that call, everything it had comes back, and everybody else is answered right."""
    _end_in_every_state("abort")


@PROMISES.row(80, mutants=("free_in_flight", "sharer_not_reset"))
def test_a_request_can_be_finished_by_its_caller_in_every_state() -> None:
    """Fault 80, for stop strings: the same as an abort, with the other code."""
    _end_in_every_state("finish")


@PROMISES.row(74, mutants=("abort_waiting_leaks",))
def test_an_aborted_request_is_not_planned_again() -> None:
    """Fault 74: from the call on, in the line, in prefill and in decode."""
    for reach in (_waiting, _between_chunks, _decoding):
        driver = scene(usable=10, max_num_batched_tokens=8)
        request = reach(driver)
        computed = request.computed
        driver.abort(request)
        driver.run()
        assert request.computed == computed
        driver.drain()


@PROMISES.row(85, planted=(OneBufferForAll,))
def test_what_a_step_in_flight_reads_stays_as_it_is() -> None:
    """Fault 85: requests come, leave and end while a step is in flight; its arrays and tables are those of its plan."""
    driver = scene()
    requests = [driver.submit(prompt(number, 5 + number), max_tokens=9) for number in range(6)]
    driver.step()
    plan = driver.plan()
    names = ("token_ids", "positions", "slot_mapping", "seq_slots", "seq_lens", "query_starts", "sample_rows", "block_tables")
    planned = {name: getattr(plan, name).copy() for name in names}
    driver.abort(requests[1])
    driver.finish(requests[2])
    driver.submit(prompt(9, 30), max_tokens=3)
    driver.reset_prefix_cache()
    for name, before in planned.items():
        assert (getattr(plan, name) == before).all(), name
    driver.commit(*driver.forward())
    driver.drain()


@PROMISES.row(118, mutants=("min_tokens_ignored", "never_ends_alone"))
def test_every_way_to_end_has_its_code_and_is_reported_once() -> None:
    """Fault 118, at the core: stop token, limits of request and model, capacity. A stop comes before a limit."""
    answer = scene().submit(prompt(1, 6), max_tokens=4).answer.first(12)
    ways: dict[str, tuple[dict[str, Any], int, int]] = {
        "stop token": ({"max_tokens": 9, "stop_token_ids": answer[3:4]}, _core.END_FINISHED_STOP, 4),
        "stop token too early": (
            {"max_tokens": 9, "min_tokens": 3, "stop_token_ids": [answer[1], answer[5]]},
            _core.END_FINISHED_STOP,
            6,
        ),
        "stop token as the last": ({"max_tokens": 4, "stop_token_ids": answer[3:4]}, _core.END_FINISHED_STOP, 4),
        "max_tokens": ({"max_tokens": 4}, _core.END_FINISHED_LENGTH, 4),
        "max_model_len": ({"max_tokens": 99}, _core.END_FINISHED_LENGTH, 12 - 6),
    }
    for way, (options, code, outputs) in ways.items():
        driver = scene(max_model_len=12 if way == "max_model_len" else 512)
        request = driver.generate(prompt(1, 6), **options)
        assert (request.end, len(request.outputs)) == (code, outputs), way
        driver.drain()
    driver = scene(usable=3)
    assert driver.generate(prompt(1, 6), max_tokens=99).end == _core.END_ABORTED_CAPACITY
    driver.drain()


test_a_planted_fault_is_caught = PROMISES.test_of_mutants()
test_a_fault_at_the_border_is_caught = PROMISES.test_of_planted()
