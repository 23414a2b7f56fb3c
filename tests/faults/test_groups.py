"""Promises of groups and windows: what is out of sight is given back and nothing else, one rule keeps and finds, every group
has blocks of its own.

Scenes have blocks of 4 tokens unless they say otherwise.
"""

import pytest

from blocktable.errors import InvalidInputError, NeverFitsError
from blocktable.testing import Driver
from tests.faults.promises import Promises
from tests.faults.scene import prompt, scene

PROMISES = Promises()


@PROMISES.row(95, mutants=("free_in_sight",))
def test_a_window_of_8_sees_what_its_definition_says_at_every_length() -> None:
    """The oracle sums over what the definition says; a block given back is poison."""
    for block_size in (3, 4):
        for length in (1, 2, 3, 7, 8, 9, 11, 12, 13, 20):
            for groups in ((8,), (None, 8)):
                driver = scene(block_size=block_size, groups=groups)
                driver.generate(prompt(1, length), max_tokens=30)
                driver.drain()


def most_blocks(window: int, chunk: int, block_size: int) -> int:
    """Blocks that the rows seen by the queries of one step touch, wherever it begins."""
    touched = [
        {row // block_size for query in range(start, start + chunk) for row in range(query - window + 1, query + 1)}
        for start in range(window, window + block_size)
    ]
    return max(map(len, touched))


@PROMISES.row(97, mutants=("window_never_freed",))
def test_a_window_holds_as_many_blocks_as_brute_force_says() -> None:
    """A pool of exactly so many serves any length; one of a block less refuses it with that number."""
    for block_size, window, chunk in ((4, 8, 1), (4, 9, 6), (3, 8, 7), (16, 20, 16), (1, 5, 3), (5, 1, 5)):
        needed = most_blocks(window, chunk, block_size)
        driver = scene(usable=needed, block_size=block_size, groups=(window,), max_num_batched_tokens=chunk)
        assert len(driver.generate(prompt(1, 90), max_tokens=20).outputs) == 20
        driver.drain()
        assert driver.scheduler.stats()["peak_blocks"] <= needed
        assert driver.scheduler.stats()["preemptions"] == 0
        smaller = scene(usable=max(1, needed - 1), block_size=block_size, groups=(window,), max_num_batched_tokens=chunk)
        with pytest.raises(NeverFitsError) as refused:
            smaller.submit(prompt(1, 90))
        assert (refused.value.needed, refused.value.usable) == (needed, needed - 1)


@PROMISES.row(97, mutants=("need_of_one_group",))
def test_the_need_of_a_request_counts_every_group() -> None:
    driver = scene(usable=5, groups=(None, None))
    with pytest.raises(NeverFitsError) as refused:
        driver.submit(prompt(1, 12))
    assert (refused.value.needed, refused.value.usable) == (6, 5)
    driver.generate(prompt(1, 8), max_tokens=1)
    driver.drain()


@PROMISES.row(98, mutants=("short_window_hit", "first_group_decides", "one_key_for_all_groups"))
def test_what_a_window_keeps_is_what_a_lookup_needs() -> None:
    """Stored once, a prompt is found up to the full block before the point where another one parts from it."""
    for window in (2, 4, 5, 6, 9, 30):
        for groups in ((window,), (None, window), (window, None)):
            driver = scene(usable=400, groups=groups)
            driver.generate(prompt(1, 30), max_tokens=2)
            for shared in range(1, 31):
                asked = prompt(1, shared) + prompt(100 + shared, 5)
                assert driver.generate(asked, max_tokens=1).cached == shared // 4 * 4
            driver.drain()


@PROMISES.row(38, mutants=("slots_of_first_group", "entry_keeps_name", "null_not_told"))
def test_a_table_of_each_group_names_blocks_of_its_own_and_null_behind_its_window() -> None:
    driver = scene(usable=28, groups=(None, 6, 11), max_num_batched_tokens=16)
    driver.submit(prompt(1, 40), max_tokens=12)
    seen: set[int] = set()
    while driver.live:
        plan = driver.plan()
        length, computed = int(plan.seq_lens[0]), int(plan.positions[0])
        tables = plan.block_tables[:, plan.seq_slots[0], : -(-length // 4)]
        for group, window in enumerate((None, 6, 11)):
            first = 0 if window is None else max(0, computed + 1 - window) // 4
            assert not tables[group, :first].any()
            assert tables[group, first:].all()
            assert not driver.oracle.tables[group, plan.seq_slots[0], :first].any()
        named = tables[tables > 0].tolist()
        assert len(set(named)) == len(named)
        assert driver.scheduler.stats()["used_blocks"] == len(named)
        seen.update(named)
        driver.commit(*driver.forward())
    assert len(seen) <= 28 < 3 * 13, "what left a window was taken again"
    driver.drain()


@PROMISES.row(98, mutants=("promise_unfreed",))
def test_a_block_that_another_still_holds_is_no_promise() -> None:
    """The second request shares blocks 2 and 3 of the first; when they leave its window the first still sees them."""
    driver = scene(usable=7, groups=(9,), max_num_batched_tokens=9, long_prefill_threshold=8)
    driver.submit(prompt(1, 17), max_tokens=4)
    driver.step()
    driver.step()
    driver.submit(prompt(1, 16) + prompt(2, 24), max_tokens=3)
    driver.run()
    driver.drain()


@PROMISES.row(98, mutants=("put_back_blind",))
def test_who_loses_what_it_shared_goes_back_as_far_as_its_window_lets_it() -> None:
    """The writer took a block of its own chain again, which the sharer would need to go on from the published part."""
    driver = scene(usable=4, groups=(6,), max_num_batched_tokens=8, long_prefill_threshold=6)
    driver.submit(prompt(1, 24), max_tokens=3)
    for _ in range(3):
        driver.step()
    sharer = driver.submit(prompt(1, 24) + prompt(2, 2), max_tokens=3)
    driver.plan()
    assert sharer.cached == 24
    driver.fail()
    assert sharer.cached == 0
    driver.run()
    driver.drain()


@PROMISES.row(50, mutants=("forward_order",))
def test_several_groups_are_released_in_one_order_on_every_path() -> None:
    """At once, and when the step in flight has ended: the last rows of all groups go first."""
    orders = []
    for is_in_flight in (False, True):
        driver = scene(usable=30, groups=(None, 6, None))
        request = driver.submit(prompt(1, 22), max_tokens=4)
        driver.step()
        driver.plan()
        if is_in_flight:
            ids, starts = driver.forward()
            driver.abort(request)
            driver.commit(ids, starts)
        else:
            driver.commit(*driver.forward())
            driver.abort(request)
        orders.append(driver.scheduler.free_queue().tolist())
    assert orders[0] == orders[1]
    assert orders[0][:3] == [18, 12, 6]
    assert orders[0][-15:] == [10, 9, 8, 7, 17, 11, 5, 16, 4, 15, 3, 14, 2, 13, 1]


def test_groups_out_of_bounds_are_refused() -> None:
    config = {"num_blocks": 9, "block_size": 4, "vocab_size": 100, "max_model_len": 16}
    for wrong in ((), (0,), (None,) * 17, (2**31,), 8, "8", (8.0,), (True,)):
        with pytest.raises(InvalidInputError, match="groups"):
            Driver(config | {"groups": wrong})
    assert Driver(config | {"groups": [None, 8]}).scheduler.config["groups"] == (None, 8)


test_a_planted_fault_is_caught = PROMISES.test_of_mutants()
