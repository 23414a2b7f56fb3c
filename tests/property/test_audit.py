"""The audit of the testing kit: what it must notice in the arrays of a plan, shown to it in arrays that were changed."""

import pickle
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from blocktable._core import Plan
from blocktable.testing import BrokenPromise, Driver
from blocktable.testing.audit import Holder, check_plan

BLOCK = 4
PROMPT = list(range(100, 121))


class Shown:
    """A plan with other block tables."""

    def __init__(self, plan: Plan, block_tables: np.ndarray[Any, np.dtype[np.int32]]) -> None:
        self._plan = plan
        self.block_tables = block_tables

    def __getattr__(self, name: str) -> Any:
        return getattr(self._plan, name)


def plans_of_hits(window: int) -> Iterator[tuple[Driver, Plan]]:
    """A prompt of five blocks that is cached, found again through a window; then shared while it is written."""
    config = {"num_blocks": 40, "block_size": BLOCK, "vocab_size": 50_021, "max_model_len": 64, "groups": (window,)}
    driver = Driver(config)
    driver.generate(PROMPT, max_tokens=1)
    driver.submit([*PROMPT, 7, 8], max_tokens=2)
    yield driver, driver.plan()
    driver = Driver(config)
    for last in (7, 8):
        driver.submit([*PROMPT, last], max_tokens=2)
    yield driver, driver.plan()


@pytest.mark.parametrize("window", [1, 4, 6, 9])
def test_a_block_that_a_hit_keeps_out_of_sight_is_noticed(window: int) -> None:
    """Entry after entry that is null gets a name: each is one block too many. Five blocks are found."""
    changed = 0
    for driver, plan in plans_of_hits(window):
        holders = {
            request.row: Holder(request.id, request.tokens) for request in driver.live.values() if request.row is not None
        }
        check_plan(plan, driver.scheduler, holders, driver.oracle.tables)
        row = int(plan.seq_slots[-1])
        shown = plan.block_tables.copy()
        null = int(np.count_nonzero(shown[0, row, : len(PROMPT) // BLOCK] == 0))
        for at in range(null - 1, -1, -1):
            shown[0, row, at] = 39 - at
            with pytest.raises(BrokenPromise, match="memory"):
                check_plan(Shown(plan, shown), driver.scheduler, holders, shown)  # type: ignore[arg-type]
            changed += 1
    assert changed == (20 + 1 - window) // BLOCK * (2 if window == 1 else 1)  # who sees itself alone shares nothing


def test_a_broken_promise_can_be_sent_to_another_process() -> None:
    broken = BrokenPromise("A5", "5 writes into block 1", calls=("match(1, [0])", "append(1, [0])"))
    broken.add_note("seed 7")
    again = pickle.loads(pickle.dumps(broken))
    assert (type(again), str(again), vars(again)) == (BrokenPromise, str(broken), vars(broken))
