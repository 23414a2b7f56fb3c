"""A driver: one scheduler, one oracle model, and the books of a careful caller, with everything checked after every call.

Before: a test that says what happens (submit, abort, a failed step). After: the same call on the scheduler, then the
audit, the poisoning of what became free, and the comparison of each token and each end with the cold answer.
What always holds: the driver never corrects the scheduler; at the first difference it raises.
"""

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from blocktable import _core
from blocktable._core import Commit, Plan, Scheduler

from .audit import BrokenPromise, Holder, Snapshot, check_drained, check_plan, recount
from .oracle import ColdAnswer, OracleModel

ANY_STEPS = 10_000
"""Bound of `run`: far more steps than any request of the tests needs, so that a livelock ends as a failure."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """What a request says of its turn, as `Scheduler.submit` takes it; times on the driver's clock, which counts calls."""

    tenant: str | None = None
    priority: int = 0
    queue_deadline_us: int | None = None
    deadline_us: int | None = None


@dataclass(slots=True)
class Request:
    """One request as its caller knows it. `end` is the code that the scheduler must report, once it has ended."""

    id: int
    prompt: list[int]
    max_tokens: int
    min_tokens: int
    stop_token_ids: frozenset[int]
    answer: ColdAnswer
    tokens: list[int]  # prompt and confirmed outputs
    turn: "Turn"
    submitted_us: int
    end: int | None = None
    row: int | None = None
    cached: int | None = None  # prompt tokens found in the cache at the first admission
    looks_again: bool = False  # it lost some of them since, and may find others in a plan
    preempted: int = 0
    num_rows: int = 0  # rows that it has, those of the plan in flight included
    computed: int = 0  # token rows computed for it, all steps and repetitions counted

    @property
    def outputs(self) -> list[int]:
        return self.tokens[len(self.prompt) :]


@dataclass(frozen=True, slots=True)
class _Use:
    """Blocks that a sequence of the plan in flight names, those of them that it writes, and the one that its last row fills."""

    named: frozenset[int]
    written: frozenset[int]
    filled_last: frozenset[int]


@dataclass(slots=True, repr=False)
class Driver:
    """Owns a scheduler made from `config` (its keyword arguments) and the oracle that runs its plans."""

    config: dict[str, Any]
    recounts: bool = True
    scheduler: Scheduler = field(init=False)
    oracle: OracleModel = field(init=False)
    requests: dict[int, Request] = field(init=False, default_factory=dict)
    live: dict[int, Request] = field(init=False, default_factory=dict)
    plan_in_flight: Plan | None = field(init=False, default=None)
    trace: list[bytes] = field(init=False, default_factory=list)
    steps: int = field(init=False, default=0)
    _rows: dict[int, Request] = field(init=False, default_factory=dict)
    _uses: dict[int, "_Use"] = field(init=False, default_factory=dict)
    _stale: set[int] = field(init=False, default_factory=set)
    _unreported: dict[int, int] = field(init=False, default_factory=dict)
    _now_us: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        self.scheduler = Scheduler(**self.config)
        self.oracle = OracleModel(
            num_blocks=self.config["num_blocks"],
            block_size=self.config["block_size"],
            vocab_size=self.config["vocab_size"],
            windows=self.windows,
        )
        self._settle()

    @property
    def now_us(self) -> int:
        """The clock: calls that told the time so far."""
        return self._now_us

    @property
    def windows(self) -> tuple[int | None, ...]:
        """The window of each group."""
        return tuple(self.config.get("groups") or (None,))

    def submit(
        self,
        prompt: Sequence[int],
        *,
        max_tokens: int = 4,
        min_tokens: int = 0,
        stop_token_ids: Sequence[int] = (),
        turn: Turn = Turn(),
        **identity: Any,
    ) -> Request:
        """`Scheduler.submit`; what it raises is raised here, after the audit. `identity`: its domain, salts, adapter, media."""
        try:
            number = self.scheduler.submit(
                prompt,
                max_tokens=max_tokens,
                min_tokens=min_tokens,
                stop_token_ids=stop_token_ids,
                now_us=self._tick(),
                **asdict(turn),
                **identity,
            )
        finally:
            self._settle()
        answer = ColdAnswer(prompt, vocab_size=self.config["vocab_size"], identity=self.oracle.identity, windows=self.windows)
        stops = frozenset(stop_token_ids)
        request = Request(
            number, list(prompt), max_tokens, min_tokens, stops, answer, list(prompt), turn, submitted_us=self._now_us
        )
        if number in self.requests:
            raise BrokenPromise("ids", f"request id {number} is given a second time")
        self.requests[number] = self.live[number] = request
        return request

    def abort(self, request: Request) -> bool:
        """`Scheduler.abort`, in whatever state the request is."""
        return self._end(request, self.scheduler.abort(request.id), _core.END_ABORTED)

    def finish(self, request: Request) -> bool:
        """`Scheduler.finish`: the caller saw a stop string."""
        return self._end(request, self.scheduler.finish(request.id), _core.END_FINISHED_STOP)

    def reset_prefix_cache(self) -> int:
        forgotten = self.scheduler.reset_prefix_cache()
        self._settle()
        return forgotten

    def plan(self) -> Plan:
        """`Scheduler.plan`, checked as a whole. If it runs something it is in flight until `commit` or `fail`."""
        plan = self.scheduler.plan(self._tick())
        self.plan_in_flight = plan if plan.num_seqs else None
        self.oracle.take_over(plan)
        self._settle()
        self._expire()
        self._keep_books(plan)
        self.trace.append(plan_digest(plan))
        holders = {row: Holder(request.id, request.tokens) for row, request in self._rows.items()}
        check_plan(plan, self.scheduler, holders, self.oracle.tables)
        self._check_progress(plan)
        if plan.num_seqs:
            self.steps += 1
            self._note_uses(plan)
        self._check_quotas()
        return plan

    def forward(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Run the oracle over the plan in flight: what `commit` takes."""
        plan = self._in_flight()
        ids, starts = self.oracle.step(plan)
        written = set((plan.slot_mapping.ravel() // self.config["block_size"]).tolist())
        early = written.intersection(self.scheduler.free_queue().tolist())
        if early:
            raise BrokenPromise("I10", f"the step in flight writes blocks {sorted(early)}, which are free already")
        return ids, starts

    def commit(self, ids: NDArray[np.int64], starts: NDArray[np.int64]) -> Commit:
        """`Scheduler.commit` of the plan in flight: `starts` may leave entries without a token, which are then sampled again.

        Each token is compared with the cold answer, each end with the rules.
        """
        plan = self._in_flight()
        step, owners = plan.step, plan.sample_requests.tolist()  # the views end with the commit
        done = self.scheduler.commit(step, ids, starts, self._tick())
        self.plan_in_flight = None
        self._settle()
        dropped: list[int] = []
        ended: dict[int, int] = {}
        for sample, owner in enumerate(owners):
            self._bring(sample, owner, ids[starts[sample] : starts[sample + 1]].tolist(), dropped, ended)
        accepted = len(ids) - len(dropped)
        if done.num_accepted != accepted or done.dropped.tolist() != dropped:
            raise BrokenPromise("epoch", f"samples {done.dropped} were dropped, {dropped} belong to nobody who runs")
        if dict(done.ended.tolist()) != ended or len(done.ended) != len(ended):
            raise BrokenPromise("ends", f"the commit ended {done.ended.tolist()}, the rules say {ended}")
        return done

    def _bring(self, sample: int, owner: int, tokens: list[int], dropped: list[int], ended: dict[int, int]) -> None:
        """What one entry of a commit does: a token is taken, or dropped if its owner left or was put back; or there is none."""
        if owner not in self.live or owner in self._stale:
            dropped += [sample] * len(tokens)
            return
        if not tokens:
            self._lose_readers(owner, self._uses[owner].filled_last)
            return
        request = self.live[owner]
        self._take_token(request, tokens[0])
        code = self._end_after_token(request)
        if code is not None:
            ended[owner] = code
            self._mark_ended(request, code)

    def fail(self) -> None:
        """`Scheduler.fail` of the plan in flight: the model brought nothing, and what it wrote is worth nothing."""
        plan = self._in_flight()
        touched = plan.slot_mapping.ravel().copy()  # the views end with the failure
        step = plan.step
        self.scheduler.fail(step)
        self.plan_in_flight = None
        self.oracle.spoil(touched)
        self._settle()
        self._reread_cached(self._uses)

    def step(self) -> Plan:
        """One whole step: plan, forward, commit. Returns the plan, whose arrays are over if it ran something."""
        plan = self.plan()
        if plan.num_seqs:
            self.commit(*self.forward())
        return plan

    def run(self, *, max_steps: int = ANY_STEPS) -> int:
        """Step until nobody lives; returns how many ran something. A plan that runs nothing counts for `max_steps` too."""
        before = self.steps
        for _ in range(max_steps):
            if not self.live:
                break
            self.step()
        if self.live:
            raise BrokenPromise("progress", f"requests {sorted(self.live)} still live after {max_steps} steps")
        return self.steps - before

    def drain(self, *, max_steps: int = ANY_STEPS) -> None:
        """Run to the end and check that nothing is held and that every end was reported exactly once."""
        self.run(max_steps=max_steps)
        self._hear_the_last_ends()
        if self._rows:
            raise BrokenPromise("rows", f"rows {sorted(self._rows)} are still held")
        check_drained(self.scheduler)

    def _hear_the_last_ends(self) -> None:
        """A plan reports as many ends as it has room for; nobody lives, so the plans that report the rest run nothing."""
        while True:
            before = len(self._unreported)
            if self.plan().num_seqs:
                raise BrokenPromise("drain", "nobody lives, and a plan runs something")
            if not self._unreported:
                return
            if len(self._unreported) == before:
                raise BrokenPromise("ends", f"ends {self._unreported} were never reported in a plan")

    def generate(self, prompt: Sequence[int], **options: Any) -> Request:
        """Submit one request and run until nobody lives."""
        request = self.submit(prompt, **options)
        self.run()
        return request

    def snapshot_trace(self) -> bytes:
        """All plans so far, bit for bit."""
        return b"".join(self.trace)

    def _tick(self) -> int:
        self._now_us += 1
        return self._now_us

    def _in_flight(self) -> Plan:
        if self.plan_in_flight is None:
            raise ValueError("no plan is in flight")
        return self.plan_in_flight

    def _settle(self) -> None:
        """After every call: the audits, and poison over all that became free."""
        self.scheduler.audit()
        if self.recounts:
            seen = Snapshot.of(self.scheduler)
            recount(seen)
            self.oracle.poison_unowned(seen.free_queue, seen.published_blocks)
        else:
            self.oracle.poison_unowned(self.scheduler.free_queue(), self.scheduler.published_blocks())

    def _end(self, request: Request, did_end: bool, code: int) -> bool:
        self._settle()
        if did_end != (request.id in self.live):
            raise BrokenPromise("A6", f"request {request.id} lives: {request.id in self.live}; ending it said {did_end}")
        if did_end:
            self._mark_ended(request, code)
            if self.plan_in_flight is not None and request.id in self._uses:
                self._lose_readers(request.id, self._uses[request.id].written)
        return did_end

    def _mark_ended(self, request: Request, code: int) -> None:
        request.end = code
        del self.live[request.id]
        self._unreported[request.id] = code

    def _take_token(self, request: Request, token: int) -> None:
        wanted = request.answer[len(request.outputs)]
        if token != wanted:
            raise BrokenPromise(
                "exact", f"request {request.id}: output {len(request.outputs)} is {token}, the cold answer is {wanted}"
            )
        request.tokens.append(token)

    def _end_after_token(self, request: Request) -> int | None:
        """The rule of the ends: a stop token from `min_tokens` outputs on, then the limits of request and model."""
        count = len(request.outputs)
        if count >= request.min_tokens and request.tokens[-1] in request.stop_token_ids:
            return _core.END_FINISHED_STOP
        if count >= request.max_tokens or len(request.tokens) >= self.config["max_model_len"]:
            return _core.END_FINISHED_LENGTH
        return None

    def _keep_books(self, plan: Plan) -> None:
        """Apply what the plan tells its caller, in the order of the contract: ended and preempted, then admitted."""
        for number, code in plan.ended.tolist():
            self._report_end(number, code)
        for number, _ in plan.preempted.tolist():
            request = self._living(number)
            if request.row is None:
                raise BrokenPromise("rows", f"request {number} is preempted, but it has no row")
            self._leave_row(request)
            request.preempted += 1
            if request.preempted > self._max_preemptions:
                times, most = request.preempted, self._max_preemptions
                raise BrokenPromise("I19", f"request {number} is preempted {times} times, at most {most} are promised")
        may_admit = 1 if self.config.get("preempt_for_waiting") else 0
        if len(plan.preempted) and len(plan.admitted) > may_admit:
            raise BrokenPromise("admission", f"a step that preempted {plan.preempted.tolist()} admits {plan.admitted.tolist()}")
        self._reread_cached([number for number, request in self.live.items() if request.looks_again])
        for number, _, row in plan.admitted.tolist():
            request = self._living(number)
            if row in self._rows or request.row is not None:
                raise BrokenPromise("rows", f"request {number} is admitted to row {row}; taken are {sorted(self._rows)}")
            request.row, self._rows[row] = row, request
            self._note_cached(request)

    def _expire(self) -> None:
        """Design 11: a plan ends everybody whose time is over, and nobody else; who was never admitted is refused."""
        for request in list(self.live.values()):
            turn, was_admitted = request.turn, request.cached is not None
            if not was_admitted and turn.queue_deadline_us is not None and turn.queue_deadline_us <= self._now_us:
                self._mark_ended(request, _core.END_REFUSED_QUEUE_DEADLINE)
            elif turn.deadline_us is not None and turn.deadline_us <= self._now_us:
                self._mark_ended(request, _core.END_ABORTED_DEADLINE)

    def _living(self, number: int) -> Request:
        if number not in self.live:
            raise BrokenPromise("A6", f"the plan moves request {number}, which does not live")
        return self.live[number]

    def _report_end(self, number: int, code: int) -> None:
        if number not in self.requests:
            raise BrokenPromise("ends", f"request {number} is reported as ended, and never was")
        request = self.requests[number]
        if code == _core.END_ABORTED_CAPACITY and request.id in self.live:
            self._mark_ended(request, code)
        if self._unreported.pop(number, None) != code:
            raise BrokenPromise("ends", f"request {number} is reported with end {code}; its end is {request.end}")
        self._leave_row(request)

    def _leave_row(self, request: Request) -> None:
        if request.row is not None:
            del self._rows[request.row]
            request.row, request.num_rows = None, 0

    def _note_cached(self, request: Request) -> None:
        """At an admission: a number is set once."""
        before, cached = request.cached, self.scheduler.num_cached_tokens(request.id)
        if before not in (None, cached):
            raise BrokenPromise("cached", f"request {request.id}: {before} cached tokens became {cached}")
        if not 0 <= cached < len(request.prompt):
            raise BrokenPromise("I9", f"request {request.id}: {cached} of {len(request.prompt)} prompt tokens are cached")
        request.cached = cached

    def _reread_cached(self, numbers: Iterable[int]) -> None:
        """After a failure: who shared what was never written found less than it seemed. In a plan it may find more again."""
        for number in numbers:
            request, cached = self.requests[number], self.scheduler.num_cached_tokens(number)
            if request.cached is None or (cached > request.cached and not request.looks_again):
                raise BrokenPromise("cached", f"request {number}: {request.cached} cached tokens became {cached}")
            request.looks_again |= cached < request.cached
            request.cached = cached

    def _note_uses(self, plan: Plan) -> None:
        """Which blocks each sequence of the plan reads and writes."""
        self._uses, self._stale = {}, set()
        block_size, starts = self.config["block_size"], plan.query_starts.tolist()
        for i, (row, length) in enumerate(zip(plan.seq_slots.tolist(), plan.seq_lens.tolist(), strict=True)):
            request = self._rows[row]
            request.computed += starts[i + 1] - starts[i]
            request.num_rows = length
            written = plan.slot_mapping[:, starts[i] : starts[i + 1]] // block_size
            named = plan.block_tables[:, row, : -(-length // block_size)]
            filled_last = written[:, -1].tolist() if length % block_size == 0 else []
            self._uses[request.id] = _Use(
                frozenset(named.ravel().tolist()) - {0}, frozenset(written.ravel().tolist()), frozenset(filled_last)
            )

    def _lose_readers(self, writer: int, blocks: frozenset[int]) -> None:
        """Design 6: the content of `blocks` will not come. Who reads them is put back, and so on: their results are stale."""
        lost = [blocks]
        while lost:
            missing = lost.pop()
            for number, use in self._uses.items():
                if number in self.live and number not in self._stale and number != writer and missing & use.named:
                    self._stale.add(number)
                    lost.append(use.written)
        self._reread_cached(self._stale)

    def _check_progress(self, plan: Plan) -> None:
        """A8, and that the request of highest rank always advances, if it runs."""
        if not self.live:
            return
        moved = plan.num_seqs > 0 or len(plan.ended) > 0 or len(plan.preempted) > 0
        if not moved:
            raise BrokenPromise("A8", f"requests {sorted(self.live)} live, and the plan runs, frees and ends nothing")
        first = min(self.live.values(), key=self._rank)
        others = (request for request in self._rows.values() if request is not first)
        if any(request.preempted >= self._max_preemptions for request in others):
            return  # it may wait for one that nobody may preempt again
        if plan.num_seqs and first.row is not None and first.row not in plan.seq_slots.tolist():
            raise BrokenPromise("I57", f"request {first.id} has a row and the highest rank, and the step does not run it")

    @property
    def _max_preemptions(self) -> int:
        most: int = self.scheduler.config["max_preemptions"]
        return most

    def _rank(self, request: Request) -> tuple[int, int]:
        """Design 10, the smaller the higher: priority, raised by waiting, then arrival."""
        if self.config.get("policy") != "priority":
            return 0, request.id
        ageing_us: int = self.config.get("ageing_us", 1_000_000)
        return request.turn.priority + request.submitted_us // ageing_us, request.id

    def _check_quotas(self) -> None:
        """No tenant holds more blocks than its hard quota. A block counts once for each table that names it."""
        block_size = self.config["block_size"]
        for tenant, rules in self.config.get("tenants", {}).items():
            rows = [(row, request.num_rows) for row, request in self._rows.items() if request.turn.tenant == tenant]
            held = sum(int(np.count_nonzero(self.oracle.tables[:, row, : -(-count // block_size)])) for row, count in rows)
            if held > rules.get("hard_blocks", held):
                raise BrokenPromise("quota", f"tenant {tenant} holds {held} blocks, its quota is {rules['hard_blocks']}")


def plan_digest(plan: Plan) -> bytes:
    """Every array of a plan, bit for bit, but for the whole table, whose changes `dirty` holds."""
    arrays = (
        plan.seq_slots,
        plan.query_starts,
        plan.seq_lens,
        plan.token_ids,
        plan.positions,
        plan.token_sources,
        plan.slot_mapping,
        plan.dirty,
        plan.dirty_ids,
        plan.copies,
        plan.sample_rows,
        plan.sample_requests,
        plan.ended,
        plan.preempted,
        plan.admitted,
    )
    return b"|".join((str(plan.step).encode(), *(array.tobytes() for array in arrays)))
