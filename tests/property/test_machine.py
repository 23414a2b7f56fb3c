"""A state machine over the scheduler: hypothesis chooses the calls, and looks for the shortest list that breaks a promise."""

from contextlib import suppress
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import Phase, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test

from blocktable import _core
from blocktable.errors import AuditError, NeverFitsError, QueueFullError, StalledError
from blocktable.testing import Driver, Request

VOCAB_SIZE = 50_021
ROOT = list(range(100, 140))
"""Prompts are beginnings of this one, with an own end, so that most of them share blocks."""


class SchedulerMachine(RuleBasedStateMachine):
    """Every rule goes through the driver, which audits, poisons and compares with the cold answer after each call."""

    driver: Driver

    @initialize(
        usable=st.integers(2, 9),
        block_size=st.sampled_from((1, 2, 4)),
        rows=st.integers(1, 4),
        budget=st.sampled_from((1, 3, 6, 40)),
        threshold=st.sampled_from((0, 3)),
        caching=st.booleans(),
    )
    def begin(self, **sizes: Any) -> None:
        self.driver = Driver(
            {
                "num_blocks": sizes["usable"] + 1,
                "block_size": sizes["block_size"],
                "vocab_size": VOCAB_SIZE,
                "max_model_len": 40,
                "max_num_seqs": sizes["rows"],
                "max_num_batched_tokens": sizes["budget"],
                "max_waiting": 6,
                "long_prefill_threshold": sizes["threshold"],
                "max_preemptions": 2,
                "enable_prefix_caching": sizes["caching"] or sizes["rows"] > 1,
            }
        )

    @rule(shared=st.integers(0, 12), own=st.integers(0, 4), name=st.integers(0, 2), max_tokens=st.integers(1, 9))
    def submit(self, shared: int, own: int, name: int, max_tokens: int) -> None:
        prompt = ROOT[:shared] + [1_000 * name + i for i in range(own)]
        with suppress(NeverFitsError, QueueFullError):
            self.driver.submit(prompt or [7], max_tokens=max_tokens)

    @rule(shared=st.integers(1, 12), count=st.integers(2, 3), max_tokens=st.integers(1, 9))
    def submit_twins(self, shared: int, count: int, max_tokens: int) -> None:
        """Prompts that differ in their last token only, so that later ones share what the first is still to write."""
        for number in range(count):
            with suppress(NeverFitsError, QueueFullError):
                self.driver.submit([*ROOT[:shared], number], max_tokens=max_tokens)

    @precondition(lambda self: self.driver.live)
    @rule(which=st.integers(0, 20))
    def abort(self, which: int) -> None:
        self.driver.abort(self._live(which))

    @precondition(lambda self: self.driver.live)
    @rule(which=st.integers(0, 20))
    def finish(self, which: int) -> None:
        self.driver.finish(self._live(which))

    @rule()
    def reset_prefix_cache(self) -> None:
        self.driver.reset_prefix_cache()

    @precondition(lambda self: self.driver.plan_in_flight is None)
    @rule()
    def plan(self) -> None:
        self.driver.plan()

    @precondition(lambda self: self.driver.plan_in_flight is not None)
    @rule()
    def commit(self) -> None:
        self.driver.commit(*self.driver.forward())

    @precondition(lambda self: self.driver.plan_in_flight is not None)
    @rule()
    def fail(self) -> None:
        self.driver.fail()

    @precondition(lambda self: self.driver.plan_in_flight is None)
    @rule(count=st.integers(1, 6))
    def steps(self, count: int) -> None:
        for _ in range(count):
            self.driver.step()

    def teardown(self) -> None:
        """Whatever was called: it drains."""
        if not hasattr(self, "driver"):
            return
        if self.driver.plan_in_flight is not None:
            self.driver.fail()
        self.driver.drain(max_steps=2_000)

    def _live(self, which: int) -> Request:
        live = list(self.driver.live.values())
        return live[which % len(live)]


test_no_order_of_calls_breaks_a_promise = SchedulerMachine.TestCase


@pytest.mark.mutant
@pytest.mark.parametrize("mutant", ["free_in_flight", "sharer_not_reset", "keep_pending_on_fail", "stall_silently"])
def test_the_machine_finds_a_planted_fault(mutant: str) -> None:
    """The control: the search reaches the faults that need several calls in the right order."""
    search = settings(max_examples=400, phases=(Phase.generate,), report_multiple_bugs=False, print_blob=False)
    _core.set_mutant(mutant)
    try:
        with pytest.raises((AssertionError, AuditError, StalledError)):
            run_state_machine_as_test(SchedulerMachine, settings=search)
    finally:
        _core.set_mutant(None)
