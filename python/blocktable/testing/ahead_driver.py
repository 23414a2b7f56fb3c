"""A driver that plans ahead: up to two steps in flight, which the oracle runs late, when they are committed.

Before: a test that says what happens, plans and commits apart. After: every token is compared with the cold answer and every
end with the rules, as by `Driver`; and the arrays of a step in flight are what they were when it was planned. Which results
are stale is the scheduler's to say; whoever has too many dropped never ends.
"""

from collections import deque
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from blocktable._core import Commit, Plan

from .audit import BrokenPromise
from .driver import ANY_STEPS, Driver, Request, plan_digest


@dataclass(frozen=True, slots=True)
class _Flying:
    """A step in flight: its plan, what that said, and the block tables that it was made with."""

    plan: Plan
    step: int
    digest: bytes
    tables: NDArray[np.int32]


@dataclass(slots=True, repr=False)
class AheadDriver(Driver):
    """`config` says `overlap_depth`: how many plans there may be since the oldest step in flight, it included."""

    flying: deque[_Flying] = field(init=False, default_factory=deque)
    _last_step: int = field(init=False, default=0)

    def may_plan(self) -> bool:
        """Whether one more plan would not be one too many."""
        depth: int = self.config.get("overlap_depth", 1)
        return not self.flying or self._last_step + 1 - self.flying[0].step < depth

    def plan(self) -> Plan:
        """`Scheduler.plan`. If it runs something it is in flight until its `commit_oldest` or `fail_oldest`."""
        plan = self.scheduler.plan(self._tick())
        self._last_step = plan.step
        self.oracle.take_over(plan)
        self._settle()
        self._expire()
        self._keep_books(plan)
        self.trace.append(plan_digest(plan))
        if plan.num_seqs:
            self.steps += 1
            self.flying.append(_Flying(plan, plan.step, self.trace[-1], self.oracle.tables.copy()))
        if len(self.flying) == int(plan.num_seqs > 0):
            self._check_progress(plan)
        self._check_quotas()
        return plan

    def commit_oldest(self, *, withheld: frozenset[int] = frozenset()) -> Commit:
        """Run the oldest step in flight and commit it; the samples of these numbers get no token."""
        flying = self._land()
        ids, _ = self.oracle.step(flying.plan, flying.tables)
        owners = flying.plan.sample_requests.tolist()
        kept = np.array([sample not in withheld for sample in range(len(ids))], np.bool_)
        starts = np.concatenate(([0], np.cumsum(kept)))
        done = self.scheduler.commit(flying.step, ids[kept], starts, self._tick())
        self._settle()
        dropped, ended = set(done.dropped.tolist()), {}
        for sample, owner in enumerate(owners):
            if not kept[sample] or sample in dropped:
                continue
            request = self._living(owner)
            self._take_token(request, int(ids[sample]))
            code = self._end_after_token(request)
            if code is not None:
                ended[owner] = code
                self._mark_ended(request, code)
        if dict(done.ended.tolist()) != ended or len(done.ended) != len(ended):
            raise BrokenPromise("ends", f"the commit ended {done.ended.tolist()}, the rules say {ended}")
        return done

    def fail_oldest(self) -> None:
        """`Scheduler.fail` of the oldest step in flight: what it wrote, and what it was to bring, is worth nothing."""
        flying = self._land()
        touched = flying.plan.slot_mapping.ravel().copy()  # the views end with the failure
        self.scheduler.fail(flying.step)
        self.oracle.spoil(touched)
        self._settle()

    def step(self) -> Plan:
        """Plan as far ahead as may be, then commit the oldest step. Returns the last plan."""
        plan = self.plan()
        while plan.num_seqs and self.may_plan():
            plan = self.plan()
        if self.flying:
            self.commit_oldest()
        return plan

    def drain(self, *, max_steps: int = ANY_STEPS) -> None:
        """As `Driver.drain`, once the steps in flight have landed."""
        while self.flying:
            self.commit_oldest()
        self.run(max_steps=max_steps)
        while self.flying:
            self.commit_oldest()
        Driver.drain(self, max_steps=max_steps)

    def _land(self) -> _Flying:
        if not self.flying:
            raise ValueError("no plan is in flight")
        flying = self.flying.popleft()
        if plan_digest(flying.plan) != flying.digest:
            raise BrokenPromise("arrays", f"the arrays of step {flying.step} changed while it was in flight")
        return flying

    def _note_cached(self, request: Request) -> None:
        """What a step in flight writes may be withdrawn before the next admission: the number is not compared."""
        request.cached = self.scheduler.num_cached_tokens(request.id)

    def _reread_cached(self, numbers: object) -> None:
        """As above."""
