"""Runs the steps: plan, forward, sample, commit, in turn, on the caller's thread.

Before: `llm.py` adds requests and asks for steps; `step_thread.py` does so on a thread of its own, for orders that others post.
After: each request's outputs lie in its inbox. Always: after `step`, however it ended, no step is in flight; a request that was
added ends exactly once. If anything but the model fails, or the caller interrupts, every request is aborted and every block is
free before the exception goes on. Orders are carried out in the order of their posting, before a plan or before a commit and
nowhere else.
"""

from __future__ import annotations

import logging
import secrets
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
from .._core import Commit, Plan, Scheduler
from ..errors import ShutDownError, WrongStepError
from ..sampling.logprobs import StepLogprobs
from ..sampling.params import child_seed
from ..sampling.random_numbers import SeedSource
from ..sampling.sampler import NO_TOKEN, Sampled, Sampler
from ..text.output_text import OutputText
from ..text.tokenizer import Tokenizer
from .crash_report import CrashReporter
from .family import Family
from .inbox import Inbox
from .intake import Job, Wishes
from .live_request import LiveRequest
from .model_runs import InlineRuns, ModelRuns, ThreadRuns
from .orders import Order, Orders
from .output_rows import SavedOutputs
from .prompt_scores import NoDistributionError, PromptRows, PromptScores
from .report import StepTimes
from .request import Prompt
from .running_rows import RunningRows
from .token_logprobs import LogprobLog
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
        self._tokenizer = tokenizer
        self._seeds = seeds
        self._max_step_retries = max_step_retries
        self._publisher = publisher
        self._rows = RunningRows(num_rows, sampler)
        self._overlaps = overlap_depth > 1
        self._runs: ModelRuns = ThreadRuns() if self._overlaps else InlineRuns()
        self._under_way: UnderWay | None = None
        self._ahead: tuple[Plan, int, int] | None = None  # made while the model runs the step before: see `_plan`
        self._requests: dict[int, LiveRequest] = {}
        self._families: dict[int, Family] = {}  # by the number of the request: those that are not over
        self._num_live = 0
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
        return self._num_live > 0

    @property
    def is_settled(self) -> bool:
        """Whether nothing is left to do: no request lives, and the rows of all that have ended are free."""
        return not self._requests and self._under_way is None

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
            prompt, sampling, wishes = job.prompt, job.sampling, job.wishes
            came_ns = now_ns if arrived_ns is None else arrived_ns
            number = self.scheduler.submit(
                prompt.array,
                max_tokens=sampling.max_tokens,
                min_tokens=sampling.min_tokens,
                stop_token_ids=sampling.end_token_ids,
                domain=wishes.tenant,
                # Rows that are to be scored have to be computed: what nobody has a key of is found by nobody.
                cache_salt=prompt.cache_salt if sampling.num_prompt_logprobs is None else secrets.token_hex(16),
                retention=prompt.retention,
                priority=wishes.priority,
                queue_deadline_us=wishes.due_us(wishes.queue_deadline_s, came_ns, now_ns),
                deadline_us=wishes.due_us(wishes.deadline_s, came_ns, now_ns),
                n=sampling.n,
                now_us=now_ns // 1000,
            )
            needs_text = is_streamed or bool(sampling.stop)
            seed = self._seeds.draw() if sampling.seed is None else sampling.seed
            family = Family() if sampling.n > 1 else None
            num_best = sampling.num_prompt_logprobs
            scores = None if num_best is None else PromptScores(prompt.array, num_best)
            for index in range(sampling.n):
                member = self._requests[number + index] = LiveRequest(
                    id=number + index,
                    request_id=str(number) if request_id is None else request_id,
                    prompt=prompt,
                    sampling=sampling,
                    seed=child_seed(seed, index),
                    inbox=inbox,
                    is_streamed=is_streamed,
                    arrived_ns=came_ns,
                    text=OutputText(self._tokenizer, prompt.token_ids, sampling) if needs_text else None,
                    index=index,
                    family=family,
                    logprobs=None if sampling.num_logprobs is None else LogprobLog(sampling.num_logprobs),
                    prompt_scores=scores,
                    tokenizer=self._tokenizer,
                    guide=None if job.grammar is None else job.grammar.guide(sampling.eos_token_ids),
                )
                if family is not None:
                    family.members.append(member)
            if family is not None:
                self._families[number] = family
            self._num_live += sampling.n
            return number

    def abort(self, number: int) -> bool:
        """End a request in whatever state it is; false if it has ended already or never was."""
        with self._way_in, self._turn:
            live = self._live(number)
            if not live:
                return False
            self.scheduler.abort(number)
            for request in live:
                self._end(request, _core.END_ABORTED)
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
            for request in list(self._requests.values()):
                self.scheduler.abort(request.id)
                if not request.is_ended:
                    self._end(request, _core.END_ABORTED)
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
        while self._num_live == 0 and self._under_way is not None:
            self._guarded_step()

    def _step(self) -> bool:
        self._orders.carry_out_all()
        step = self._under_way
        if step is None:
            plan, plan_ns, cpu_ns = self._plan()
            self._apply(plan)
            step = self._launch(plan, plan_ns, cpu_ns, None)
        if step is not None:
            if self._overlaps:
                self._ahead = self._plan()
            self._finish(step)
        if self._num_live == 0 and self._requests and self._under_way is None:
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
        scored = self._rows.to_score(plan)
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
                sampled = self._sampler.sample(logits, rows, self._rows.outputs.positions(rows), step.children)
        except Exception as error:  # noqa: BLE001 - whatever a model raises, the engine goes on; it is logged with its trace
            self._under_way = None
            self._survive(plan, error)
            return
        sampled_ns = time.perf_counter_ns()
        self._failures = 0
        self._under_way = None
        for entry, failure in sampled.failed:
            # Logits that held no choice end their own request, and no other.
            for request in self._rows.live(rows[entry : entry + 1]):
                self._end_with_error(request, failure)
        if step.scored is not None:
            self._note_scores(step.scored)
        ahead, self._ahead = self._ahead, None
        if ahead is not None:
            self._apply(ahead[0])
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
        self._take(step, sampled, done, now_ns)
        self.times.add_hand_out(time.perf_counter_ns() - now_ns)

    def _take(self, step: UnderWay, sampled: Sampled, done: Commit, now_ns: int) -> None:
        """Record what a step brought: tokens, text, ends."""
        rows, children, ids, logprobs = step.rows, step.children, sampled.ids, sampled.logprobs
        if done.num_accepted < len(ids):
            # Some entries brought no token, or one that no longer counts: its request was aborted meanwhile, or was put back
            # because it shared a block that was withdrawn, and will be sampled again.
            kept = ids != NO_TOKEN
            kept[done.dropped] = False
            rows, ids = rows[kept], ids[kept]
            children = None if children is None else children[kept]
            logprobs = None if logprobs is None else logprobs.without(~kept)
        if logprobs is not None:
            self._note_logprobs(step, logprobs)
        ended: dict[int, int] = dict(done.ended.tolist()) if len(done.ended) else {}
        if children is not None:
            later, own = children > 0, children == 0
            self._part(rows[later], ids[later], children[later], now_ns, ended)
            rows, ids = rows[own], ids[own]
        self._rows.take(rows, ids, now_ns)
        for request, token_id in self._rows.speaking(rows, ids):
            code = ended.pop(request.id, None)
            if code is None and request.is_plain:
                request.speak(token_id)
            else:
                self._speak(request, token_id, code)
        for number, code in ended.items():
            self._end(self._requests[number], code)

    def _note_logprobs(self, step: UnderWay, told: StepLogprobs) -> None:
        """Give each answer the log probabilities of its new token, before anybody is told of that."""
        rows = step.rows[told.entries].tolist()
        children = [0] * len(rows) if step.children is None else step.children[told.entries].tolist()
        for place, (row, child) in enumerate(zip(rows, children)):
            request = self._rows.at(row)
            if child and request is not None:
                request = None if request.family is None else request.family.members[child]
            if request is not None and request.logprobs is not None:
                request.logprobs.add(told, place)

    def _note_scores(self, scored: PromptRows) -> None:
        """Give each prompt its log probabilities; where one has none, its request ends."""
        for request, position in self._rows.note_scores(scored):
            if not request.is_ended:
                self._end_with_error(request, NoDistributionError(position))

    def _part(
        self,
        rows: NDArray[np.int32],
        ids: NDArray[np.int64],
        children: NDArray[np.int64],
        now_ns: int,
        ended: dict[int, int],
    ) -> None:
        """The prompt of requests for several answers is computed: the first tokens of all but the first answer, which have no
        row of their own yet. Takes what it tells out of `ended`."""
        for row, token_id, child in zip(rows.tolist(), ids.tolist(), children.tolist()):
            first = self._rows.at(row)
            if first is None or first.family is None:
                continue
            first.family.has_parted = True
            request = first.family.members[child]
            request.num_cached, request.scheduled_ns = first.num_cached, first.scheduled_ns
            request.saved = SavedOutputs(np.array([token_id], dtype=np.int32), now_ns, now_ns)
            code = ended.pop(request.id, None)
            if request.is_heard:
                self._speak(request, token_id, code)
            elif code is not None:
                self._end(request, code)

    def _speak(self, request: LiveRequest, token_id: int, code: int | None) -> None:
        """Bring text and grammar of a request on by a token; end it if the core did (`code`), or if one of them is complete."""
        by_token = code is not None and request.is_end_token(code, [token_id])
        piece = request.take_token(token_id, ended_by_token=by_token)
        if code is None:
            code = self._end_of_text(request, token_id)
        if code is not None:
            self._end(request, code, piece=piece, is_new=True)
        elif request.is_streamed:
            request.give(piece, token_id)

    def _end_of_text(self, request: LiveRequest, token_id: int) -> int | None:
        """The code of the end that a stop string brings, or a grammar after which nothing can follow."""
        code, guide = None, request.guide
        if request.text is not None and request.text.stop_string is not None:
            code = _core.END_FINISHED_STOP
        elif guide is not None:
            guide.take(token_id)
            if guide.failure is not None:
                logger.warning("request %d ends: its grammar cannot go on: %s", request.id, guide.failure)
                code = _core.END_ABORTED
            elif guide.is_over:
                code = _core.END_FINISHED_STOP
        if code is not None:
            self.scheduler.finish(request.id)
        return code

    def _survive(self, plan: Plan, error: Exception) -> None:
        """The model failed: undo the step, and the one planned since. It will be planned again, unless it failed too often."""
        requests = list(self._rows.live(plan.seq_slots))
        ahead, self._ahead = self._ahead, None
        self.scheduler.fail(plan.step)
        if ahead is not None:
            self._apply(ahead[0])
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
                self._end_with_error(request, error)

    def _apply(self, plan: Plan) -> None:
        """Keep the rows as the plan says: who left first, who came after."""
        for number, code in plan.ended.tolist():
            self._forget(number, code)
        for number, child in plan.preempted.tolist():
            self._leave_row(number + child)
        for number, child, row in plan.admitted.tolist():
            self._enter_row(number + child, row)

    def _forget(self, number: int, code: int) -> None:
        request = self._requests.get(number)
        if request is None:
            return
        family = request.family
        # Before its answers have parted, the core knows the first one only.
        members = [request] if family is None or family.has_parted else family.members
        for member in members:
            if not member.is_ended:
                self._end(member, code)
            self._rows.leave(member)
            del self._requests[member.id]

    def _leave_row(self, number: int) -> None:
        request = self._requests.get(number)
        if request is not None:
            request.loses(time.perf_counter_ns())
            self._rows.leave(request)

    def _enter_row(self, number: int, row: int) -> None:
        request = self._requests.get(number)
        if request is None:
            # An interrupt fell between its submit and our note of it: nobody waits for it.
            self.scheduler.abort(number)
            return
        request.enters(time.perf_counter_ns())
        self._rows.enter(request, row)
        if request.num_cached is None:
            request.num_cached = self.scheduler.num_cached_tokens(number)

    def _end(self, request: LiveRequest, code: int, **new: Any) -> None:
        """Hand out the last output. Its row stays until a plan says that it is free."""
        self._num_live -= 1
        if request.num_cached is None:
            request.num_cached = 0
        request.end(code, self._rows.outputs_of(request), **new)
        if request.family is not None and not request.family.live:
            del self._families[request.family.members[0].id]

    def _live(self, number: int) -> list[LiveRequest]:
        """Those of a request that have not ended."""
        family = self._families.get(number)
        if family is not None:
            return family.live
        request = self._requests.get(number)
        return [] if request is None or request.is_ended else [request]

    def _end_with_error(self, request: LiveRequest, error: Exception) -> None:
        """It ends, and with it all answers of its request."""
        number = request.id - request.index
        logger.error("request %d ends with an error: %r", number, error)
        self.scheduler.abort(number)
        for member in self._live(number):
            member.error = error
            self._end(member, _core.END_ABORTED)

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
            self._apply(plan)
            if plan.num_seqs:
                # Somebody whom nobody knows: see `_enter_row`.
                self.scheduler.fail(plan.step)
            elif len(plan.ended) == 0:
                break
        for request in list(self._requests.values()):
            self._forget(request.id, _core.END_ABORTED)
