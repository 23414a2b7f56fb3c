"""Progress (catalogue 54 to 63): what can never fit is refused, what is alone and does not fit ends, nobody is stuck."""

from itertools import permutations

import pytest

from blocktable import _core
from blocktable.errors import InvalidInputError, NeverFitsError
from blocktable.testing import REFUSALS, Driver, Request, Snapshot
from tests.faults.planted import ClampsWhatIsBad
from tests.faults.promises import Promises
from tests.faults.scene import prompt, scene

PROMISES = Promises()


@PROMISES.row(55, mutants=("null_usable", "no_never_fits"))
def test_a_prompt_around_the_size_of_the_pool_is_served_or_refused_with_the_numbers() -> None:
    """Fault 55: N blocks with the null block, lengths (N - 2) * B to N * B; the request behind is always served."""
    block_size, num_blocks = 4, 6
    usable = num_blocks - 1
    for length in range((num_blocks - 2) * block_size, num_blocks * block_size + 1):
        driver = scene(usable=usable, block_size=block_size)
        before = Snapshot.of(driver.scheduler)
        needed = -(-length // block_size)
        if needed > usable:
            with pytest.raises(NeverFitsError) as refusal:
                driver.submit(prompt(1, length), max_tokens=1)
            assert (refusal.value.needed, refusal.value.usable) == (needed, usable)
            before.check_unchanged(driver.scheduler, except_for=REFUSALS)
            assert driver.scheduler.stats()["refused"] == 1
        else:
            first = driver.submit(prompt(1, length), max_tokens=1)
        behind = driver.submit(prompt(2, 6), max_tokens=2)
        driver.run(max_steps=20)
        assert behind.end == _core.END_FINISHED_LENGTH
        assert needed > usable or first.end == _core.END_FINISHED_LENGTH
        driver.drain()


@PROMISES.row(56, 61, mutants=("never_ends_alone",))
def test_the_last_request_that_outgrows_the_pool_ends_for_capacity_and_the_next_is_served() -> None:
    """Faults 56, 61: 4 blocks, one request wants 10 blocks of output: right up to there, then it ends with that code."""
    driver = scene(usable=4)
    big = driver.submit(prompt(1, 6), max_tokens=40)
    driver.run(max_steps=30)
    assert big.end == _core.END_ABORTED_CAPACITY
    assert big.preempted == 0
    assert len(big.outputs) == 4 * 4 - 6 + 1, "every row of the pool was used"
    next_one = driver.submit(prompt(2, 6), max_tokens=1)
    driver.run(max_steps=2)
    assert next_one.end == _core.END_FINISHED_LENGTH
    driver.drain()


@PROMISES.row(56, mutants=("preempt_equal", "never_ends_alone"))
def test_two_requests_that_both_outgrow_the_pool_end_one_after_the_other() -> None:
    """Fault 56: the earlier one is never preempted; each ends for capacity; each was preempted a bounded number of times."""
    driver = scene(usable=4)
    first, second = driver.submit(prompt(1, 4), max_tokens=60), driver.submit(prompt(2, 7), max_tokens=60)
    driver.run(max_steps=60)
    assert (first.end, second.end) == (_core.END_ABORTED_CAPACITY,) * 2
    assert first.preempted == 0
    assert second.preempted <= 1
    driver.drain()


@PROMISES.row(58, mutants=("stall_silently", "sharer_not_reset"))
def test_no_order_of_waiting_requests_comes_to_rest_with_somebody_waiting() -> None:
    """Fault 58: a sharer of a prefix in flight, one that does not fit yet, a plain one: all orders, a failure in each step."""
    for order in permutations(("sharer", "big", "plain")):
        for failing in range(4):
            for leave in (False, True):
                _come_to_rest(order, failing, leave=leave)


def _come_to_rest(order: tuple[str, ...], failing: int, *, leave: bool) -> None:
    prompts = {"sharer": [*prompt(1, 24), 7], "big": prompt(2, 27), "plain": prompt(3, 3)}
    driver = scene(usable=10, long_prefill_threshold=8)
    writer = driver.submit(prompt(1, 26), max_tokens=3)
    for name in order:
        driver.submit(prompts[name], max_tokens=60 if name == "plain" else 3)  # the plain one outgrows the pool in the end
    for step in range(4):
        driver.plan()
        if step == failing:
            if leave:
                driver.abort(writer)
            driver.fail()
        else:
            driver.commit(*driver.forward())
    driver.run(max_steps=120)
    driver.drain()


@PROMISES.row(59, mutants=("preempt_two",))
def test_one_missing_block_costs_one_preemption() -> None:
    """Fault 59: ten run, one needs a block: one victim, below it in rank, and nobody is admitted in that step."""
    driver = scene(usable=1 + 9 * 2)
    taker = driver.submit(prompt(0, 4), max_tokens=3)
    others = [driver.submit(prompt(1 + number, 5), max_tokens=3) for number in range(9)]
    late = driver.submit(prompt(20, 3), max_tokens=1)
    driver.step()
    assert driver.scheduler.stats()["free_blocks"] == 0
    plan = driver.plan()
    assert len(plan.preempted) == 1
    assert len(plan.admitted) == 0
    assert late.row is None
    assert taker.row is not None
    assert sum(request.preempted for request in others) == 1
    driver.commit(*driver.forward())
    driver.drain()


def _two_victims(driver: Driver) -> tuple[list[Request], Request, Request]:
    """Two requests that each need a block at the same step, a cheap and a dear one below them, and no free block."""
    takers = [driver.submit(prompt(number, 4), max_tokens=6) for number in (1, 2)]
    cheap = driver.submit(prompt(3, 3), max_tokens=9)
    dear = driver.submit(prompt(4, 15), max_tokens=9)
    driver.step()
    return takers, cheap, dear


@PROMISES.row(59, mutants=("admit_after_preempt",))
def test_a_step_that_preempted_admits_nobody() -> None:
    """Design 10: what was freed is not given to a request that waits, not even to one that was preempted just now."""
    driver = scene(usable=7)
    takers, cheap, dear = _two_victims(driver)
    assert driver.scheduler.stats()["free_blocks"] == 0
    plan = driver.plan()
    assert len(plan.preempted) >= 1
    assert len(plan.admitted) == 0
    assert all(taker.row is not None for taker in takers)
    driver.commit(*driver.forward())
    driver.drain()
    assert (cheap.end, dear.end) == (_core.END_FINISHED_LENGTH,) * 2


@PROMISES.row(59, mutants=("preempted_to_tail",))
def test_a_preempted_request_comes_back_before_later_ones() -> None:
    """Design 10: rank is arrival, and preemption does not change it."""
    driver = scene(usable=5)
    driver.submit(prompt(1, 8), max_tokens=2)
    victim = driver.submit(prompt(2, 10), max_tokens=4)
    driver.step()
    late = [driver.submit(prompt(3 + number, 8), max_tokens=2) for number in range(2)]
    order = []
    while driver.live:
        plan = driver.plan()
        order += plan.admitted[:, 0].tolist()
        if plan.num_seqs:
            driver.commit(*driver.forward())
    assert victim.preempted == 1
    assert order[0] == victim.id
    assert {request.id for request in late} <= set(order)
    driver.drain()


@PROMISES.row(62, mutants=("stall_silently",))
def test_with_nothing_to_run_no_step_is_in_flight_and_the_next_request_runs() -> None:
    """Fault 62: an empty plan has no tokens and needs no commit; after all members of a batch left, the next plan goes on."""
    driver = scene(usable=4)
    for _ in range(3):
        plan = driver.plan()
        assert (plan.num_seqs, plan.num_tokens, len(plan.sample_rows)) == (0, 0, 0)
    batch = [driver.submit(prompt(number, 4), max_tokens=9) for number in range(2)]
    driver.plan()
    for request in batch:
        driver.abort(request)
    driver.commit(*driver.forward())
    assert driver.plan().num_seqs == 0
    assert driver.generate(prompt(3, 5), max_tokens=2).end == _core.END_FINISHED_LENGTH
    driver.generate(prompt(1, 6), max_tokens=40)
    driver.drain()


@PROMISES.row(55, mutants=("no_never_fits",))
def test_what_must_be_made_counts_towards_what_can_never_fit() -> None:
    """I17: outputs that a request must make (min_tokens) need rows as well; those that it may make do not."""
    driver = scene(usable=4)
    with pytest.raises(NeverFitsError) as refusal:
        driver.submit(prompt(1, 10), max_tokens=20, min_tokens=20)
    assert refusal.value.needed > refusal.value.usable == 4
    driver.submit(prompt(1, 10), max_tokens=20)
    driver.drain()


@PROMISES.row(125, planted=(ClampsWhatIsBad,))
def test_a_prompt_as_long_as_the_model_allows_is_refused_by_its_length() -> None:
    """Fault 125, at the core: L - 2 and L - 1 are served, L and L + 1 are refused, whatever max_tokens is."""
    length = 32
    for max_tokens in (1, 2):
        driver = scene(max_model_len=length)
        for size in (length - 2, length - 1):
            request = driver.generate(prompt(1, size), max_tokens=max_tokens)
            assert len(request.outputs) == min(max_tokens, length - size)
        for size in (length, length + 1):
            with pytest.raises(InvalidInputError) as refusal:
                driver.submit(prompt(1, size), max_tokens=max_tokens)
            assert (refusal.value.field, refusal.value.value) == ("prompt_len", size)
        driver.drain()


@PROMISES.row(64, mutants=("no_budget_for_decodes",))
def test_a_decoder_gets_a_token_in_every_step_whatever_arrives() -> None:
    """Fault 64: one decodes while long prompts of higher rank prefill and others keep arriving, one at a time or eight."""
    for at_once in (1, 8):
        driver = scene(usable=600, max_num_batched_tokens=16, long_prefill_threshold=10)
        driver.submit(prompt(1, 25), max_tokens=2)
        # These wait for the prefix of the first, so the decoder passes them; then they rank above it.
        early = [driver.submit(prompt(1, 24) + prompt(2 + number, 200), max_tokens=2) for number in range(2)]
        decoder = driver.submit(prompt(9, 3), max_tokens=60)
        for number in range(50):
            for i in range(at_once if number % 10 == 0 else 0):
                driver.submit(prompt(10 + number * 8 + i, 60), max_tokens=2)
            driver.step()
            assert len(decoder.outputs) == number + 1
        assert all(request.end == _core.END_FINISHED_LENGTH for request in early), "prompts move on too"
        driver.drain()


@PROMISES.row(65, mutants=("pass_for_ever",))
def test_a_blocked_head_lets_small_ones_pass_and_not_for_ever() -> None:
    """Fault 65: the head needs all of the pool, of which one holds half; of the small ones that keep coming three pass."""
    driver = scene(usable=20, max_pass=3)
    holder = driver.submit(prompt(1, 38), max_tokens=30)
    driver.step()
    head = driver.submit(prompt(2, 72), max_tokens=2)
    small = []
    for number in range(12):
        small.append(driver.submit(prompt(10 + number, 3), max_tokens=2))
        driver.step()
    assert [len(request.outputs) > 0 for request in small].count(True) == 3, "up to the bound"
    while not head.outputs:
        driver.step()
    assert holder.end == _core.END_FINISHED_LENGTH
    assert [len(request.outputs) > 0 for request in small].count(True) <= 4, "nobody else came first"
    driver.drain()


test_a_planted_fault_is_caught = PROMISES.test_of_mutants()
test_a_fault_at_the_border_is_caught = PROMISES.test_of_planted()
