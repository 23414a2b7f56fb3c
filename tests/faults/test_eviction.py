"""Eviction order (catalogue 50 to 53): one order, whatever path a release takes, and the oldest content goes first."""

import pytest

from blocktable.errors import InvalidInputError
from blocktable.testing import Driver, Request
from tests.faults.promises import Promises
from tests.faults.scene import prompt, scene

PROMISES = Promises()


def _queue_after(end: str) -> list[int]:
    """A request of 3 full blocks and a partial tail, in a pool of 10, ends in one way: the free queue then."""
    driver = scene(usable=10)
    request = driver.submit(prompt(1, 14), max_tokens=6)
    driver.step()
    if end == "length":
        driver.run()
        return driver.scheduler.free_queue().tolist()
    if end == "abort in flight":
        driver.plan()
        driver.abort(request)
        driver.commit(*driver.forward())
    elif end == "abort in flight, failed":
        driver.plan()
        driver.abort(request)
        driver.fail()
    elif end == "abort":
        driver.abort(request)
    else:
        driver.finish(request)
    return driver.scheduler.free_queue().tolist()


@PROMISES.row(50, mutants=("head_order", "forward_order"))
def test_every_way_to_end_releases_in_the_same_order() -> None:
    """Fault 50: tail first; without content before the head, published content behind the tail (design 1)."""
    for end in ("finish", "abort", "abort in flight", "abort in flight, failed"):
        assert _queue_after(end) == [4, 5, 6, 7, 8, 9, 10, 3, 2, 1], end
    assert _queue_after("length") == [5, 6, 7, 8, 9, 10, 4, 3, 2, 1], "by then the fourth block was full"


@PROMISES.row(50, mutants=("forward_order",))
def test_a_preemption_releases_in_the_order_of_every_other_end() -> None:
    """Fault 50: the victim's tail is the taker's next block, its published blocks are the last to be evicted."""
    driver = scene(usable=6)
    taker = driver.submit(prompt(1, 8), max_tokens=3)
    victim = driver.submit(prompt(2, 13), max_tokens=3)
    plan = driver.plan()
    of_victim = plan.block_tables[0, victim.row, :4].tolist()
    driver.commit(*driver.forward())
    plan = driver.plan()
    assert victim.preempted == 1
    assert plan.block_tables[0, taker.row, 2] == of_victim[3]
    assert driver.scheduler.free_queue().tolist() == of_victim[2::-1]
    driver.commit(*driver.forward())
    driver.drain()


def _store(driver: Driver, number: int) -> tuple[Request, set[int]]:
    """A prompt of one block and one token; the blocks that became published by it."""
    before = set(driver.scheduler.published_blocks().tolist())
    request = driver.generate(prompt(number, 5), max_tokens=1)
    return request, set(driver.scheduler.published_blocks().tolist()) - before


@PROMISES.row(52, mutants=("head_order", "hit_keeps_in_queue"))
def test_a_hit_makes_content_young_again_and_the_oldest_goes_first() -> None:
    """Fault 52: store a, b, c, d; hit a; store e and f: b goes, then c; e stays."""
    driver = scene(usable=5)
    blocks = {}
    for name in range(1, 5):
        _, (blocks[name],) = _store(driver, name)
    hit, new = _store(driver, 1)
    assert (hit.cached, new) == (4, set())
    _, (fifth,) = _store(driver, 5)
    assert set(driver.scheduler.published_blocks().tolist()) == {blocks[1], blocks[3], blocks[4], fifth}
    _, (sixth,) = _store(driver, 6)
    assert set(driver.scheduler.published_blocks().tolist()) == {blocks[1], blocks[4], fifth, sixth}
    driver.drain()


@PROMISES.row(53, mutants=("unpublished_to_tail",))
def test_without_caching_the_block_that_came_back_last_is_handed_out_next() -> None:
    """Fault 53: one block taken and released 100 times in a pool of 1,000 is the same block each time."""
    driver = scene(usable=1_000, enable_prefix_caching=False)
    seen = set()
    for number in range(100):
        driver.submit(prompt(number, 4), max_tokens=1)
        plan = driver.plan()
        seen.add(int(plan.block_tables[0, plan.seq_slots[0], 0]))
        driver.commit(*driver.forward())
    assert seen == {1}
    driver.drain()


@PROMISES.row(50, mutants=("forward_order",))
def test_a_parent_outlives_its_cached_child() -> None:
    """I58: as content is evicted block by block, what is left of a chain can still be found from its start."""
    chain = prompt(1, 17)  # 4 full blocks and a tail of one row: 4 of 8 blocks keep content
    for evicted in range(5):
        driver = scene(usable=8)
        driver.generate(chain, max_tokens=1)
        driver.generate(prompt(2, 4 * (4 + evicted)), max_tokens=1)
        assert driver.generate(chain, max_tokens=1).cached == 4 * (4 - evicted)
        driver.drain()


def _hits_beside_a_flood(**shares: dict[str, int]) -> list[int]:
    """Tokens of a tenant's prompt of 8 full blocks that are found, again and again, while another brings 12 times the pool."""
    driver = scene(usable=40, **shares)
    found = []
    for number in range(12):
        found.append(driver.generate(prompt(1, 33), max_tokens=1, domain="steady").cached)
        for flood in range(10):
            driver.generate(prompt(2 + 10 * number + flood, 14), max_tokens=3, domain="flood")
    driver.drain()
    return found


@PROMISES.row(49, mutants=("shares_ignored",))
def test_a_flood_of_one_tenant_leaves_the_others_their_share() -> None:
    """Fault 49: with a share what a tenant uses stays whole; without one it is gone each time, as the documents say."""
    assert _hits_beside_a_flood() == [0] * 12
    assert _hits_beside_a_flood(domain_shares={"steady": 9}) == [0] + [32] * 11


def test_shares_that_no_pool_can_keep_are_refused() -> None:
    """Each by its field; what was said is among the scheduler's settings."""
    assert scene(usable=10, domain_shares={"a": 4, "b": 6}).scheduler.config["domain_shares"] == {"a": 4, "b": 6}
    wrong: tuple[object, ...] = (
        {"a": 4, "b": 7},
        {"a": 0},
        {"": 1},
        {"a": -1},
        {"a": 1.5},
        {1: 1},
        [("a", 1)],
        3,
        {"a" * 1025: 1},
    )
    for shares in wrong:
        with pytest.raises(InvalidInputError, match="domain_shares"):
            scene(usable=10, domain_shares=shares)


test_a_planted_fault_is_caught = PROMISES.test_of_mutants()
