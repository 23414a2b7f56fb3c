"""Forks and truncations through Python: rows are shared, copies are told by the plan, bad calls are refused by their type.

Before: `Scheduler.fork` and `truncate`. After: the oracle executes the plan's copies; every sequence answers as it would alone.
"""

import pytest

from blocktable import InvalidInputError, NoFreeRowError, NotRunningError, Scheduler, UnknownRequestError
from blocktable.testing.audit import check_drained
from blocktable.testing.oracle import OracleModel

SIZES = {"num_blocks": 64, "block_size": 4, "vocab_size": 1009}


class Engine:
    """A scheduler and the oracle model, one step at a time."""

    def __init__(self, **more: int) -> None:
        self.scheduler = Scheduler(**SIZES, max_model_len=80, **more)
        self.oracle = OracleModel(**SIZES)
        self.outputs: dict[int, list[int]] = {}
        self.copies: list[list[int]] = []

    def step(self) -> None:
        plan = self.scheduler.plan(0)
        self.oracle.take_over(plan)
        self.copies += plan.copies.tolist()
        if not plan.num_seqs:
            return
        ids, starts = self.oracle.step(plan)
        for request, token in zip(plan.sample_requests.tolist(), ids.tolist(), strict=True):
            self.outputs.setdefault(request, []).append(token)
        self.scheduler.commit(plan.step, ids, starts, 0)
        self.scheduler.audit()

    def drain(self) -> None:
        while self.scheduler.num_running or self.scheduler.num_waiting:
            self.step()
        check_drained(self.scheduler)


def alone(num_outputs: int) -> list[int]:
    engine = Engine()
    request = engine.scheduler.submit(list(range(10)), max_tokens=num_outputs)
    engine.drain()
    return engine.outputs[request]


def test_a_child_goes_on_as_its_parent_would() -> None:
    engine = Engine()
    parent = engine.scheduler.submit(list(range(10)), max_tokens=20)
    engine.step()
    child = engine.scheduler.fork(parent, max_tokens=20)
    assert engine.scheduler.stats()["used_blocks"] == 3, "a fork takes no block"
    engine.drain()
    wanted = alone(20)
    assert engine.outputs[parent] == wanted
    assert wanted[:1] + engine.outputs[child] == wanted
    assert engine.copies == [[0, 3, 4, 2]], "group 0: two rows of block 3 go to block 4, before the first write of two"


def test_a_truncated_request_says_the_same_again() -> None:
    engine = Engine()
    request = engine.scheduler.submit(list(range(10)), max_tokens=12)
    for _ in range(7):
        engine.step()
    said = engine.outputs[request]
    engine.scheduler.truncate(request, 12)
    del said[2:]
    engine.drain()
    assert said == alone(12)
    assert engine.copies[0][3] == 3, "the block of row 11 is published: three rows are kept in a copy"


def test_bad_forks_and_truncations_change_nothing() -> None:
    engine = Engine(max_num_seqs=2)
    scheduler = engine.scheduler
    parent = scheduler.submit(list(range(10)), max_tokens=9)
    with pytest.raises(NotRunningError):
        scheduler.fork(parent, max_tokens=9)
    engine.step()
    with pytest.raises(UnknownRequestError):
        scheduler.fork(99, max_tokens=9)
    with pytest.raises(InvalidInputError, match="max_tokens"):
        scheduler.fork(parent, max_tokens=1)
    for wrong in (0, 12):
        with pytest.raises(InvalidInputError, match="num_tokens"):
            scheduler.truncate(parent, wrong)
    with pytest.raises(UnknownRequestError):
        scheduler.truncate(99, 1)
    scheduler.fork(parent, max_tokens=9)
    with pytest.raises(NoFreeRowError):
        scheduler.fork(parent, max_tokens=9)
    assert scheduler.stats()["forks"] == 1
    engine.drain()
