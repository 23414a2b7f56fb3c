"""Two steps in flight: the next plan is made while the model runs the last one (design 13, 14; faults 67, 68, 85).

Random schedules with everything at once are `rust/core/tests/suite/overlap_random.rs`; here the same promises through the
border.
"""

from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from blocktable import _core
from blocktable._core import Plan, Scheduler
from blocktable.errors import InvalidInputError, StepInFlightError, WrongStepError
from blocktable.testing import OracleModel, cold
from tests.faults.promises import Promises

PROMISES = Promises()

VOCAB_SIZE = 50_021
CONFIG: dict[str, Any] = {"num_blocks": 40, "block_size": 4, "vocab_size": VOCAB_SIZE, "max_model_len": 64, "max_num_seqs": 4}


class Ahead:
    """A caller that has up to `overlap_depth` plans in flight and lets the oracle run the oldest when it is committed."""

    def __init__(self, **config: Any) -> None:
        self.config = CONFIG | config
        self.scheduler = Scheduler(**self.config)
        self.oracle = OracleModel(num_blocks=self.config["num_blocks"], block_size=4, vocab_size=VOCAB_SIZE)
        self.flying: deque[Plan] = deque()
        self.outputs: dict[int, list[int]] = {}
        self.ends: dict[int, int] = {}

    def submit(self, prompt: Sequence[int], **options: Any) -> int:
        number = self.scheduler.submit(prompt, **options)
        self.outputs[number] = []
        return number

    def plan(self) -> bool:
        plan = self.scheduler.plan(0)
        self.scheduler.audit()
        if plan.num_seqs:
            self.flying.append(plan)
        else:
            self.oracle.take_over(plan)
        return plan.num_seqs > 0

    def commit(self) -> _core.Commit:
        plan = self.flying.popleft()
        self.oracle.take_over(plan)
        ids, starts = self.oracle.step(plan)
        owners = plan.sample_requests.tolist()
        done = self.scheduler.commit(plan.step, ids, starts, 0)
        self.scheduler.audit()
        dropped = set(done.dropped.tolist())
        for sample, owner in enumerate(owners):
            if sample not in dropped:
                self.outputs[owner].append(int(ids[sample]))
        self.ends |= dict(done.ended.tolist())
        return done

    def run(self) -> None:
        while True:
            while len(self.flying) < self.config.get("overlap_depth", 1) and self.plan():
                pass
            if not self.flying:
                return
            self.commit()


@pytest.mark.parametrize("depth", [1, 2])
def test_texts_are_the_cold_ones(depth: int, seed: int) -> None:
    """Prompts that begin alike, in a pool too small for all of them: hits, chunks, preemption."""
    rng = np.random.default_rng(seed)
    ahead = Ahead(overlap_depth=depth, num_blocks=16, max_num_batched_tokens=16)
    root = rng.integers(0, VOCAB_SIZE, 12).tolist()
    asked = {}
    for i in range(12):
        prompt = root[: int(rng.integers(0, 13))] + rng.integers(0, VOCAB_SIZE, 1 + i % 5).tolist()
        count = int(rng.integers(1, 24))
        asked[ahead.submit(prompt, max_tokens=count)] = cold(prompt, count, vocab_size=VOCAB_SIZE)
    ahead.run()
    assert ahead.outputs == asked
    assert set(ahead.ends.values()) == {_core.END_FINISHED_LENGTH}
    assert ahead.scheduler.stats()["used_blocks"] == 0


@PROMISES.row(67, 79, mutants=("wasted_token_shown",))
def test_a_stop_that_comes_late_wastes_one_token_that_is_never_shown() -> None:
    prompt = [1, 2, 3, 4, 5, 6]
    answer = cold(prompt, 3, vocab_size=VOCAB_SIZE)
    ahead = Ahead(overlap_depth=2)
    number = ahead.submit(prompt, max_tokens=20, stop_token_ids=[answer[2]])
    ahead.run()
    assert ahead.outputs[number] == answer
    assert ahead.ends == {number: _core.END_FINISHED_STOP}
    assert ahead.scheduler.stats()["scheduled_tokens"] == len(prompt) + 3


def test_a_limit_is_foreseen_and_wastes_nothing() -> None:
    ahead = Ahead(overlap_depth=2)
    number = ahead.submit([1, 2, 3], max_tokens=5)
    ahead.run()
    assert len(ahead.outputs[number]) == 5
    assert ahead.scheduler.stats()["scheduled_tokens"] == 3 + 4


@PROMISES.row(68, mutants=("leases_end_together", "free_in_flight"))
def test_blocks_that_the_second_step_names_are_free_when_it_has_ended() -> None:
    ahead = Ahead(overlap_depth=2)
    number = ahead.submit([1, 2, 3, 4, 5], max_tokens=20)
    assert ahead.plan()
    assert ahead.plan()
    free = len(ahead.scheduler.free_queue())
    assert ahead.scheduler.abort(number)
    assert len(ahead.scheduler.free_queue()) == free
    assert ahead.commit().dropped.tolist() == [0]
    assert len(ahead.scheduler.free_queue()) == free
    assert ahead.commit().dropped.tolist() == [0]
    assert len(ahead.scheduler.free_queue()) == CONFIG["num_blocks"] - 1


@PROMISES.row(67, mutants=("fail_leaves_next",))
def test_a_failure_takes_the_next_step_along() -> None:
    prompt = [1, 2, 3, 4, 5]
    ahead = Ahead(overlap_depth=2)
    number = ahead.submit(prompt, max_tokens=6)
    assert ahead.plan()
    assert ahead.plan()
    failed = ahead.flying.popleft()
    ahead.oracle.take_over(failed)
    ahead.scheduler.fail(failed.step)
    ahead.scheduler.audit()
    plan = ahead.flying.popleft()
    done = ahead.scheduler.commit(plan.step, np.zeros(1, np.int64), np.arange(2), 0)
    assert done.dropped.tolist() == [0]
    ahead.oracle.take_over(plan)
    ahead.run()
    assert ahead.outputs[number] == cold(prompt, 6, vocab_size=VOCAB_SIZE)


def test_steps_end_in_order_and_a_third_plan_is_refused() -> None:
    ahead = Ahead(overlap_depth=2)
    ahead.submit([1, 2, 3], max_tokens=9)
    assert ahead.plan()
    assert ahead.plan()
    with pytest.raises(StepInFlightError):
        ahead.scheduler.plan(0)
    with pytest.raises(WrongStepError):
        ahead.scheduler.fail(ahead.flying[1].step)
    ahead.commit()
    assert ahead.plan()


def test_arrays_of_both_steps_stay_as_they_are() -> None:
    ahead = Ahead(overlap_depth=2)
    for first in range(3):
        ahead.submit([first, 2, 3, 4, 5, 6, 7], max_tokens=12)
    kept: deque[list[bytes]] = deque()

    def arrays(plan: Plan) -> list[bytes]:
        views = (plan.token_ids, plan.token_sources, plan.positions, plan.slot_mapping, plan.block_tables, plan.sample_rows)
        return [view.tobytes() for view in views]

    while True:
        while len(ahead.flying) < 2 and ahead.plan():
            kept.append(arrays(ahead.flying[-1]))
        if not ahead.flying:
            return
        assert arrays(ahead.flying[0]) == kept.popleft()
        ahead.commit()


test_a_planted_fault_is_caught = PROMISES.test_of_mutants()


@pytest.mark.parametrize("depth", [0, 3])
def test_other_depths_are_refused(depth: int) -> None:
    with pytest.raises(InvalidInputError) as refusal:
        Scheduler(**CONFIG, overlap_depth=depth)
    assert (refusal.value.field, refusal.value.value) == ("overlap_depth", depth)
