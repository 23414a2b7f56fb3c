"""Runs the steps: plan, forward, sample, commit, in turn, on the caller's thread.

Before: `llm.py` adds requests and asks for steps; `step_thread.py` does so on a thread of its own, for orders that others post.
After: each request's outputs lie in its inbox. Always: after `step`, however it ended, no step is in flight; a request that was
added ends exactly once. If anything but the model fails, or the caller interrupts, every request is aborted and every block is
free before the exception goes on. Orders are carried out in the order of their posting, before a plan or before a commit and
nowhere else.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from .. import _core
from .._core import Plan, Scheduler
from ..errors import ShutDownError, WrongStepError
from ..sampling.random_numbers import SeedSource
from ..sampling.sampler import Sampled, Sampler
from ..text.tokenizer import Tokenizer
from .crash_report import CrashReporter
from .hand_out import HandOut
from .inbox import Inbox
from .intake import Job, Wishes
from .model_runs import InlineRuns, ModelRuns, ThreadRuns
from .orders import Order, Orders
from .prompt_scores import PromptRows
from .report import StepTimes
from .request import Prompt
from .roster import Roster
from .under_way import EventSink, Forward, UnderWay, children_of, filled

logger = logging.getLogger("blocktable.engine")

NO_STEP = 2**63 - 1
"""No step has this number: naming it makes the core say which one is in flight."""


_OPEN: AbstractContextManager[Any] = nullcontext()


class StepLoop:
    """One engine's requests and its steps. Safe to call from several threads: a call waits for the step under way."""

    def __init__(
        self,
        *,
        scheduler: Scheduler,
        runner: Forward,
        sampler: Sampler,
        tokenizer: Tokenizer | None,
        seeds: SeedSource,
        num_rows: int,
        max_step_retries: int,
        publisher: EventSink | None = None,
        crash_reporter: CrashReporter | None = None,
        overlap_depth: int = 1,
    ) -> None:
        self.scheduler = scheduler
        self._crash_reporter = CrashReporter(scheduler, num_bytes=0) if crash_reporter is None else crash_reporter
        self.times = StepTimes()
        self._runner = runner
        self._sampler = sampler
        self._max_step_retries = max_step_retries
        self._publisher = publisher
        self._roster = Roster(scheduler=scheduler, sampler=sampler, tokenizer=tokenizer, seeds=seeds, num_rows=num_rows)
        self._hand_out = HandOut(scheduler, self._roster)
        self._overlaps = overlap_depth > 1
        self._runs: ModelRuns = ThreadRuns() if self._overlaps else InlineRuns()
        self._under_way: UnderWay | None = None
        self._ahead: tuple[Plan, int, int] | None = None  # made while the model runs the step before: see `_plan`
        self._failures = 0  # of the model, in a row
        self._is_torn = False  # a call was left half way
        self._is_closed = False
        self._turn = threading.RLock()
        # Whoever has come to add or abort holds the gate until it has had its turn. A step passes through it first: a loop of
        # steps that lets go of `_turn` for a moment only would take it again before anybody else wakes up.
        self._gate = threading.Lock()
        self._orders = Orders()

    @property
    def has_unfinished(self) -> bool:
        """Whether a request was added that has not ended."""
        return self._roster.num_live > 0

    @property
    def is_settled(self) -> bool:
        """Whether nothing is left to do: no request lives, and the rows of all that have ended are free."""
        return self._roster.is_empty and self._under_way is None

    def add(
        self,
        job: Job,
        inbox: Inbox,
        *,
        is_streamed: bool = False,
        arrived_ns: int | None = None,
        request_id: str | None = None,
    ) -> int:
        """Queue one request; returns its number. Its outputs go to `inbox`: one at its end, or, if it is streamed, one a token.
        They call it `request_id`, or by its number.

        Raises what `Scheduler.submit` does: `InvalidInputError`, `NeverFitsError`, `QueueFullError`, and `ShutDownError` after
        `close`; nothing is queued then.
        """
        with self._way_in, self._turn:
            if self._is_closed:
                raise ShutDownError
            self._mend()
            now_ns = time.perf_counter_ns()
            came_ns = now_ns if arrived_ns is None else arrived_ns
            return self._roster.add(job, inbox, is_streamed=is_streamed, came_ns=came_ns, now_ns=now_ns, request_id=request_id)

    def abort(self, number: int) -> bool:
        """End a request in whatever state it is; false if it has ended already or never was."""
        with self._way_in, self._turn:
            live = self._roster.live(number)
            if not live:
                return False
            self.scheduler.abort(number)
            for request in live:
                self._roster.end(request, _core.END_ABORTED)
            if not self._orders.is_busy:
                self._land()
            return True

    def drop(self, numbers: Iterable[int]) -> None:
        """End requests that nobody reads any more: now, or, in the middle of anybody's call, before the next plan or commit.

        Never waits. May be called from a finalizer, which may fall into the middle of a call of its own thread.
        """
        for number in numbers:
            self._orders.post(partial(self.abort, number))
        if self._has_turn():
            return
        try:
            if self._turn.acquire(blocking=False):
                self._mend()
                self._orders.carry_out_all()
                self._land()
        finally:
            # Not by what `acquire` returned: an interrupt may fall in between.
            if self._has_turn():
                self._turn.release()

    def post(self, order: Order) -> None:
        """Have `order` carried out by whoever runs the steps, before its next plan or commit. From any thread; never waits."""
        self._orders.post(order)

    def wait(self, timeout_s: float | None = None) -> None:
        """Sleep until an order is posted, at most `timeout_s`, and carry it out."""
        order = self._orders.next(timeout_s)
        if order is None:
            return
        with self._turn:
            self._mend()
            self._orders.carry_out(order)

    def step(self, *, lands: bool = True) -> bool:
        """Run one step: outputs go to the inboxes. With nothing to run it only tells ends, and returns false.

        With overlap the next one is under way afterwards; if nobody lives any more it is finished first, unless not `lands`.

        A failure of the model is tried again, `max_step_retries` times in a row; then the requests of that step end with an
        error. Any other exception (`KeyboardInterrupt` among them) aborts all requests, frees everything and goes on.
        """
        with self._gate:
            pass
        with self._turn:
            has_run = self._guarded_step()
            if lands:
                self._land()
            return has_run

    def abandon(self) -> None:
        """Fail the step in flight, abort every request, and free everything."""
        with self._turn:
            self._is_torn = True
            # A model that still runs writes into blocks that somebody else is given afterwards.
            self._runs.settle()
            self._under_way = self._ahead = None
            self._fail_any_steps()
            for request in self._roster.all():
                self.scheduler.abort(request.id)
                if not request.is_ended:
                    self._roster.end(request, _core.END_ABORTED)
            self._settle()
            self._failures = 0
            self._is_torn = False

    def pin(self, prompt: Prompt, wishes: Wishes) -> tuple[int, int]:
        """Hold the cached prefix of a prompt of that tenant; returns what `Scheduler.pin` does, and raises what it raises."""
        with self._way_in, self._turn:
            return self.scheduler.pin(prompt.array, domain=wishes.tenant, cache_salt=prompt.cache_salt)

    def unpin(self, pin: int) -> None:
        """Give a pin back. Raises `InvalidInputError` if there is no such pin any more."""
        with self._way_in, self._turn:
            self.scheduler.unpin(pin)

    def reset_prefix_cache(self) -> int:
        """Forget cached prefixes that no running request uses; returns how many blocks forgot theirs."""
        with self._way_in, self._turn:
            forgotten = self.scheduler.reset_prefix_cache()
            if self._publisher is not None:
                self._publisher.drain(self.scheduler)
            return forgotten

    def close(self) -> None:
        """Abandon everything, for good: nothing is queued any more."""
        with self._turn:
            self._is_closed = True
            try:
                self.abandon()
            finally:
                self._runs.close()
                if self._publisher is not None:
                    self._publisher.drain(self.scheduler)
                    self._publisher.close()

    def _has_turn(self) -> bool:
        """Whether this thread is in the middle of a call. `threading.Condition` asks its lock the same."""
        return bool(self._turn._is_owned())  # type: ignore[attr-defined]

    @property
    def _way_in(self) -> AbstractContextManager[Any]:
        """The gate; not in an order, which has the turn already: whoever holds the gate may be waiting for that."""
        return _OPEN if self._orders.is_busy else self._gate

    def _mend(self) -> None:
        """An earlier call was interrupted even while it cleaned up: do that now."""
        if self._is_torn:
            self.abandon()

    def _guarded_step(self) -> bool:
        self._mend()
        try:
            return self._step()
        except BaseException as error:
            # Noted before anything is called: a second interrupt may cut the clean-up short.
            self._is_torn = True
            self._crash_reporter.report(error)
            self.abandon()
            raise

    def _land(self) -> None:
        """Nobody lives: finish what is under way for nobody, so that it holds no blocks."""
        while self._roster.num_live == 0 and self._under_way is not None:
            self._guarded_step()

    def _step(self) -> bool:
        self._orders.carry_out_all()
        step = self._under_way
        if step is None:
            plan, plan_ns, cpu_ns = self._plan()
            self._roster.apply(plan)
            step = self._launch(plan, plan_ns, cpu_ns, None)
        if step is not None:
            if self._overlaps:
                self._ahead = self._plan()
            self._finish(step)
        if self._roster.num_live == 0 and not self._roster.is_empty and self._under_way is None:
            self._settle()
        if self._publisher is not None:
            self._publisher.drain(self.scheduler)
        return step is not None

    def _plan(self) -> tuple[Plan, int, int]:
        """A plan, and the nanoseconds that it took, by the wall and of this thread's CPU."""
        begun_cpu_ns = time.thread_time_ns()
        begun_ns = time.perf_counter_ns()
        plan = self.scheduler.plan(begun_ns // 1000)
        return plan, time.perf_counter_ns() - begun_ns, time.thread_time_ns() - begun_cpu_ns

    def _launch(self, plan: Plan, plan_ns: int, cpu_ns: int, before: Sampled | None) -> UnderWay | None:
        """Have the model run a plan, if there is something in it. `before` is what was sampled for the plan before it, if that
        is not committed yet."""
        if plan.num_seqs == 0:
            return None
        sequences = np.searchsorted(plan.query_starts[1:], plan.sample_rows, side="right")
        token_ids = None if before is None else filled(plan, before)
        rows, children = plan.seq_slots[sequences], children_of(plan, sequences)
        scored = self._roster.rows.to_score(plan)
        run = self._runs.launch(lambda: self._forward(plan, token_ids, scored))
        self._under_way = UnderWay(plan, plan_ns, cpu_ns, rows, run, children, scored)
        return self._under_way

    def _forward(self, plan: Plan, token_ids: NDArray[np.int64] | None, scored: PromptRows | None) -> torch.Tensor:
        with torch.inference_mode():
            if scored is not None:
                return self._runner.forward(plan, token_ids, scored)
            return self._runner.forward(plan) if token_ids is None else self._runner.forward(plan, token_ids)

    def _finish(self, step: UnderWay) -> None:
        """Wait for the model, launch what was planned meanwhile, and commit: text is made while the model runs again."""
        plan, rows = step.plan, step.rows
        awaited_ns = time.perf_counter_ns()
        # What a signal's handler raises here is no failure of the model, which still writes.
        step.run.wait()
        try:
            logits = step.run.result()
            came_ns = time.perf_counter_ns()
            # In this mode because the sampler may write into the logits, which were made in it.
            with torch.inference_mode():
                sampled = self._sampler.sample(logits, rows, self._roster.rows.outputs.positions(rows), step.children)
        except Exception as error:  # noqa: BLE001 - whatever a model raises, the engine goes on; it is logged with its trace
            self._under_way = None
            self._survive(plan, error)
            return
        sampled_ns = time.perf_counter_ns()
        self._failures = 0
        self._under_way = None
        for entry, failure in sampled.failed:
            # Logits that held no choice end their own request, and no other.
            for request in self._roster.rows.live(rows[entry : entry + 1]):
                self._roster.end_with_error(request, failure)
        if step.scored is not None:
            self._hand_out.note_scores(step.scored)
        ahead, self._ahead = self._ahead, None
        if ahead is not None:
            self._roster.apply(ahead[0])
            self._launch(*ahead, sampled)
        # Who left while the model ran is gone before its result comes.
        self._orders.carry_out_all()
        ids, starts = sampled.accepted()
        begun_cpu_ns = time.thread_time_ns()
        begun_ns = time.perf_counter_ns()
        done = self.scheduler.commit(plan.step, ids, starts, begun_ns // 1000)
        now_ns = time.perf_counter_ns()
        self.times.add(
            step.plan_ns,
            now_ns - begun_ns,
            cpu_ns=step.cpu_ns + time.thread_time_ns() - begun_cpu_ns,
            model_ns=came_ns - awaited_ns,
            sample_ns=sampled_ns - came_ns,
        )
        self._hand_out.take(step, sampled, done, now_ns)
        self.times.add_hand_out(time.perf_counter_ns() - now_ns)

    def _survive(self, plan: Plan, error: Exception) -> None:
        """The model failed: undo the step, and the one planned since. It will be planned again, unless it failed too often."""
        requests = list(self._roster.rows.live(plan.seq_slots))
        ahead, self._ahead = self._ahead, None
        self.scheduler.fail(plan.step)
        if ahead is not None:
            self._roster.apply(ahead[0])
            if ahead[0].num_seqs:
                self.scheduler.fail(ahead[0].step)
        self._failures += 1
        if self._failures <= self._max_step_retries:
            logger.warning("a step failed and runs again (%d of %d): %r", self._failures, self._max_step_retries, error)
            return
        self._failures = 0
        logger.error("a step failed %d times: its %d requests end", self._max_step_retries + 1, len(requests), exc_info=error)
        for request in requests:
            if not request.is_ended:
                self._roster.end_with_error(request, error)

    def _fail_any_steps(self) -> None:
        """Fail the steps in flight: the core knows them, even if the interrupt fell before a plan arrived here."""
        while True:
            try:
                self.scheduler.fail(NO_STEP)
            except WrongStepError as refused:
                if refused.expected is None:
                    return
                self.scheduler.fail(refused.expected)

    def _settle(self) -> None:
        """Nobody is live: let plans tell the ends, until all rows are free and nothing is remembered."""
        while True:
            plan = self.scheduler.plan(time.perf_counter_ns() // 1000)
            self._roster.apply(plan)
            if plan.num_seqs:
                # Somebody whom nobody knows: see `_enter_row`.
                self.scheduler.fail(plan.step)
            elif len(plan.ended) == 0:
                break
        for request in self._roster.all():
            self._roster.forget(request.id, _core.END_ABORTED)
