"""The map of the pool says of every block what it is doing, and whose it is; recounted here from the tables and the queue."""

import numpy as np
import pytest

from blocktable import NoSuchBlockError, Scheduler, _core
from blocktable.testing import Driver, Turn

NULL, FREE, CACHED, HELD, SHARED, PINNED, PARKED = range(7)
SEVERAL = 255
CONFIG = {"num_blocks": 24, "block_size": 4, "vocab_size": 50_021, "max_model_len": 64, "max_num_seqs": 5}
ROOT = list(range(100, 116))


class MapChecker:
    """Compares the map of a driver's scheduler with what its other views and the plans say."""

    def __init__(self, driver: Driver) -> None:
        self.driver = driver
        self.met: set[int] = set()
        self.num_several = 0

    def check(self) -> None:
        scheduler = self.driver.scheduler
        uses, tenants, names = scheduler.block_map()
        refs, free = scheduler.block_refs(), set(scheduler.free_queue().tolist())
        published = set(scheduler.published_blocks().tolist())
        wanted = np.where(refs == 1, HELD, SHARED)
        for block in np.flatnonzero(refs == 0).tolist():
            wanted[block] = PARKED if block not in free else CACHED if block in published else FREE
        wanted[0] = NULL
        wanted[uses == PINNED] = PINNED
        assert uses.tolist() == wanted.tolist()
        assert np.count_nonzero(uses == PINNED) == scheduler.stats()["pinned_blocks"]
        self.check_tenants(tenants, names)
        self.met |= set(uses.tolist())

    def check_tenants(self, tenants: np.ndarray, names: list[str]) -> None:
        whose: dict[int, set[str]] = {}
        for number, request in self.driver.live.items():
            for block in range(CONFIG["num_blocks"]):
                if any(naming[0] == number for naming in self.driver.scheduler.block_namings(block)):
                    whose.setdefault(block, set()).add(request.turn.tenant or "")
        told = {block: names[n - 1] if n != SEVERAL else "several" for block, n in enumerate(tenants.tolist()) if n}
        assert told == {block: next(iter(owners)) if len(owners) == 1 else "several" for block, owners in whose.items()}
        self.num_several += "several" in told.values()


def play(seed: int) -> MapChecker:
    """Three tenants that share a beginning, growth until somebody is preempted, aborts while a step is in flight."""
    rng = np.random.default_rng(seed)
    driver = Driver(CONFIG | {"pin_budget": 4, "estimate_growth": False})
    checker = MapChecker(driver)
    for turn in range(40):
        if turn % 2 == 0:
            prompt = ROOT[: rng.integers(1, 17)] + rng.integers(0, 99, rng.integers(1, 8)).tolist()
            tenant = str(rng.choice(["a", "b", "c"]))
            driver.submit(prompt, max_tokens=int(rng.integers(1, 24)), turn=Turn(tenant=tenant))
        if turn == 20:
            driver.scheduler.pin(ROOT)
        plan = driver.plan()
        checker.check()
        if plan.num_seqs:
            if turn % 3 == 0 and driver.live:
                driver.abort(next(iter(driver.live.values())))
                checker.check()
            driver.commit(*driver.forward())
        checker.check()
    return checker


def play_some() -> None:
    checkers = [play(seed) for seed in range(3)]
    assert set().union(*(checker.met for checker in checkers)) == set(range(7))
    assert sum(checker.num_several for checker in checkers)


def test_every_block_is_told_with_its_use_and_its_tenant():
    play_some()


@pytest.mark.mutant
@pytest.mark.parametrize("fault", ["map_keeps_last_tenant", "map_shows_parked_free"])
def test_a_map_that_tells_something_else_is_found(fault):
    _core.set_mutant(fault)
    try:
        with pytest.raises(AssertionError):
            play_some()
    finally:
        _core.set_mutant(None)


def test_where_a_block_is_named():
    scheduler = Scheduler(**CONFIG)
    first, second = (scheduler.submit([*ROOT, tail], max_tokens=4, tenant="a") for tail in (1, 2))
    plan = scheduler.plan(0)
    block = int(plan.block_tables[0, plan.seq_slots[0], 1])
    assert scheduler.block_namings(block) == [(first, 0, 1), (second, 0, 1)]
    assert scheduler.block_namings(0) == scheduler.block_namings(20) == []
    with pytest.raises(NoSuchBlockError):
        scheduler.block_namings(24)


def test_tenants_beyond_254_are_told_together():
    scheduler = Scheduler(num_blocks=400, block_size=4, vocab_size=100, max_model_len=8, max_num_seqs=300)
    for number in range(300):
        scheduler.submit([1], max_tokens=4, tenant=f"tenant {number}")
    scheduler.plan(0)
    _, tenants, names = scheduler.block_map()
    assert len(names) == 254
    assert np.bincount(tenants, minlength=256)[[0, 1, 254, 255]].tolist() == [100, 1, 1, 46]
