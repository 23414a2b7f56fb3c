"""Owns one stretch of decode steps: a scheduler brought to the state that a case asks for, and stepped under the clock.

Before: `scheduler.py` names the case. After: samples of `plan` and `commit`. An episode that has used up its requests is
begun again between two steps, unseen by the clock; what is timed is always the same state of the same size.
"""

import gc
from dataclasses import dataclass
from time import perf_counter_ns, sleep, thread_time_ns

import numpy as np

from .. import _core
from .._core import Commit, Plan, Scheduler
from .clock import Samples
from .load import BLOCK_SIZE, VOCAB_SIZE, Answers, Ids, age, prompt_rows
from .row import Row, check

PROMPT = 513
"""Tokens of the shortest prompt: one more than full blocks. With phases spread, prompts have up to 15 more."""
WARM_UP = 4
"""Steps after each beginning that are not timed."""
LEAST_ROWS_TO_AGE = 32
"""With fewer sequences side by side a pool does not get shuffled."""
EXPIRIES = 100
"""Requests that pass their queue deadline in a step of `expiries`, or are aborted before each of `arrivals`: as many come."""
TENANTS = 16
"""Requests belong to so many in turn; only policy fair looks at it."""
LONGEST = 8192
"""Tokens of the longest request: an episode in which nobody ends is over before its requests have more."""
HEAD = "head"
"""Tenant of the request that is retried."""


@dataclass(frozen=True, slots=True)
class Case:
    """What a row of the benchmark is measured on."""

    running: int
    waiting: int = 0
    case: str = "steady"
    policy: str = "fcfs"
    pool: str = "fresh"
    phase: str = "spread"
    gap_ms: int = 0


@dataclass(frozen=True, slots=True)
class Timing:
    """Samples of each step in nanoseconds."""

    plan_ns: Samples
    commit_ns: Samples
    wall_ns: Samples
    finishes: int


class Episode:
    """A scheduler in the middle of its decode steps."""

    def __init__(self, case: Case, *, num_blocks: int, rng: np.random.Generator, is_long: bool = False) -> None:
        """`is_long`: what runs is begun anew as rarely as the pool allows."""
        self.case = case
        self.num_blocks = num_blocks
        self._rng = rng
        self._is_long = is_long
        self._rows = max(case.running, LEAST_ROWS_TO_AGE) if case.pool == "aged" and case.waiting == 0 else case.running
        self._answers = Answers.of(self._rows + 1, rng)
        self._lasts = self._length()
        self._left = 0
        self._live: list[int] = []
        self._now = 0
        self._submitted = 0
        self._scheduler: Scheduler | None = None
        if case.case == "head_retried":
            self._rows, self.num_blocks = case.running + 1, self._tight_pool()

    def time_steps(self, steps: int) -> Timing:
        """Plan and commit `steps` times under both clocks."""
        plan_ns, commit_ns, wall_ns = (np.empty(steps, np.int64) for _ in range(3))
        finishes = 0
        scheduler: Scheduler | None = None
        plan: Plan | None = None
        for i in range(steps):
            last, scheduler = scheduler, self._ready()
            if scheduler is not last:
                last = plan = None  # the last pool's memory goes back now, which takes milliseconds, and not in a timed step
            cpu, wall = thread_time_ns(), perf_counter_ns()
            plan = scheduler.plan(self._now)
            wall_ns[i], plan_ns[i] = perf_counter_ns() - wall, thread_time_ns() - cpu
            wanted = len(plan.sample_rows)
            ids, starts = self._answers.of_step(plan.step)[:wanted], self._answers.starts[: wanted + 1]
            cpu, wall = thread_time_ns(), perf_counter_ns()
            done = scheduler.commit(plan.step, ids, starts, self._now)
            wall_ns[i] += perf_counter_ns() - wall
            commit_ns[i] = thread_time_ns() - cpu
            finishes += len(done.ended)
        return Timing(plan_ns, commit_ns, wall_ns, finishes)

    def count_made(self, steps: int) -> Row:
        """What a step leaves behind that the collector watches, and what it allocates in Rust; over at most `steps` steps."""
        gc.disable()
        try:
            self._begin()
            steps = min(steps, self._left)  # no new beginning in between
            objects, allocations = gc.get_count()[0], _core.allocations()
            for _ in range(steps):
                self._step(self._ready())
            objects, allocations = gc.get_count()[0] - objects, _core.allocations() - allocations
        finally:
            gc.enable()
        counted = _core.allocations() > 0  # making a scheduler takes some, so 0 means that this build does not count
        return {
            "gc_objects_per_step": round(objects / steps, 3),
            "allocs_per_step": round(allocations / steps, 3) if counted else None,
        }

    def check_answers(self) -> None:
        """The plans are what the case says, and carry the ids that were committed."""
        scheduler = self._begin()
        last: dict[int, int] = {}
        turnover = int(self.case.case == "turnover")
        for _ in range(2 * BLOCK_SIZE + 1):
            self._prepare(scheduler)
            plan = scheduler.plan(self._now)
            if self.case.case in ("expiries", "arrivals"):
                check(holds=len(plan.ended) == EXPIRIES, what=f"{EXPIRIES} end while they wait, found {len(plan.ended)}")
            self._check_plan(plan, last)
            done = self._answers.commit(scheduler, plan)
            last = dict(zip(plan.sample_requests.tolist(), self._answers.of_step(plan.step).tolist()))
            check(holds=len(done.ended) == turnover, what=f"{turnover} finishes a step, found {len(done.ended)}")
        check(holds=scheduler.num_running == self.case.running - turnover, what="all decode")
        scheduler.audit()
        self._left = 0

    def _check_plan(self, plan: Plan, last: dict[int, int]) -> None:
        running, turnover = self.case.running, self.case.case == "turnover"
        check(holds=plan.num_seqs == running, what=f"{running} sequences a step, found {plan.num_seqs}")
        check(holds=turnover or plan.num_tokens == running, what=f"one token each, found {plan.num_tokens}")
        check(holds=len(plan.sample_rows) == running, what=f"{running} samples a step, found {len(plan.sample_rows)}")
        inputs = dict(zip(plan.sample_requests.tolist(), plan.token_ids[plan.sample_rows].tolist()))
        as_committed = all(inputs.get(request, token) == token for request, token in last.items())
        check(holds=as_committed, what="a committed id is the next input")
        rows, lens = plan.seq_slots, plan.seq_lens
        offsets = (lens - 1) % BLOCK_SIZE
        blocks = plan.block_tables[0][rows, (lens - 1) // BLOCK_SIZE].astype(np.int64)
        slots = plan.slot_mapping[0][plan.query_starts[1:] - 1]
        check(holds=bool((slots == blocks * BLOCK_SIZE + offsets).all()), what="slots follow from the block tables")
        check(holds=len(np.unique(slots)) == running, what="no two sequences write to one slot")

    def check_drained(self) -> None:
        """Nothing is held when all have ended."""
        scheduler = self._end()
        scheduler.audit()
        check(holds=scheduler.num_running == 0 and scheduler.num_waiting == 0, what="all ended")
        check(holds=len(scheduler.free_queue()) == self.num_blocks - 1, what="every block came back")

    def _ready(self) -> Scheduler:
        """The scheduler, one step before the next that counts."""
        scheduler = self._scheduler
        if scheduler is None or self._left == 0:
            scheduler = self._begin()
        self._left -= 1
        self._prepare(scheduler)
        return scheduler

    def _prepare(self, scheduler: Scheduler) -> None:
        """What happens between two steps: the pause; in `turnover` one arrival; in `expiries` as many as end in the step; in
        `arrivals` the same, and as many aborts."""
        self._now += 1
        if self.case.case == "turnover":
            self._submit(scheduler, prompt_rows(1, PROMPT, self._rng)[0], self.case.running)
        if self.case.case == "expiries":
            for prompt in prompt_rows(EXPIRIES, PROMPT, self._rng):
                self._submit(scheduler, prompt, 1, queue_deadline_us=self._now + self.case.waiting // EXPIRIES)
        if self.case.case == "arrivals":
            for prompt in prompt_rows(EXPIRIES, PROMPT, self._rng):
                self._submit(scheduler, prompt, 1)
            for request in self._live[self.case.running : self.case.running + EXPIRIES]:
                scheduler.abort(request)
            del self._live[self.case.running : self.case.running + EXPIRIES]
        if self.case.gap_ms:
            sleep(self.case.gap_ms / 1000)

    def _step(self, scheduler: Scheduler) -> Commit:
        """Plan and commit with nobody watching."""
        return self._answers.commit(scheduler, scheduler.plan(self._now))

    def _begin(self) -> Scheduler:
        """End what runs, and bring a new set of requests to their first decode step."""
        keep = self.case.pool == "aged" and self.case.case != "head_retried"
        scheduler = self._end() if keep and self._scheduler is not None else self._new_scheduler()
        self._scheduler = scheduler
        self._submit_running(scheduler)
        while (plan := scheduler.plan(self._now)).num_tokens != plan.num_seqs:
            self._answers.commit(scheduler, plan)
        self._answers.commit(scheduler, plan)
        self._submit_waiting(scheduler)
        for _ in range(WARM_UP):
            self._prepare(scheduler)
            self._step(scheduler)
        self._left = self._lasts
        return scheduler

    def _end(self) -> Scheduler:
        """Abort all that live."""
        scheduler = self._scheduler or self._new_scheduler()
        for request in self._live:
            scheduler.abort(request)
        self._live.clear()
        scheduler.plan(self._now)  # takes the ends note of; nothing is left to run
        return scheduler

    def _new_scheduler(self) -> Scheduler:
        case = self.case
        head = (self.num_blocks + 1) * BLOCK_SIZE if case.case == "head_retried" else 0
        scheduler = Scheduler(
            num_blocks=self.num_blocks,
            block_size=BLOCK_SIZE,
            vocab_size=VOCAB_SIZE,
            max_model_len=max(LONGEST, head, PROMPT + 2 * case.running + 64),
            max_num_seqs=self._rows,
            # All prompts in one step, so that phases are as named; with 8,192 sequences in two.
            max_num_batched_tokens=min(1 << 22, self._rows * (PROMPT + BLOCK_SIZE)),
            max_waiting=case.waiting + 4 * self._rows + 2 * EXPIRIES + 64,
            policy=case.policy,
            max_pass=0,
            tenants={HEAD: {"weight": 4096}},  # the first by name: of equal counters its own is the lowest
        )
        self._live.clear()
        if case.pool == "aged":
            age(scheduler, self._rng)
        return scheduler

    def _submit_running(self, scheduler: Scheduler) -> None:
        case = self.case
        prompts = prompt_rows(case.running, PROMPT + BLOCK_SIZE - 1, self._rng)
        for i, prompt in enumerate(prompts):
            length = PROMPT + (i % BLOCK_SIZE if case.phase == "spread" else 0)
            # In `turnover` the first ends at the second decode step, the next one step later, and so on.
            output = i + 3 if case.case == "turnover" else self._lasts + WARM_UP + 4
            self._submit(scheduler, prompt[:length], output)

    def _submit_waiting(self, scheduler: Scheduler) -> None:
        case = self.case
        if case.waiting == 0:
            return
        if case.case == "head_retried":
            head = (len(scheduler.free_queue()) + 1) * BLOCK_SIZE
            self._submit(scheduler, prompt_rows(1, head, self._rng)[0], 1, is_head=True)
        behind = case.waiting - int(case.case == "head_retried")
        output = case.running if case.case == "turnover" else 1
        for i, prompt in enumerate(prompt_rows(behind, PROMPT, self._rng)):
            due = self._now + 1 + i // EXPIRIES if case.case == "expiries" else None
            self._submit(scheduler, prompt, output, queue_deadline_us=due)

    def _submit(
        self,
        scheduler: Scheduler,
        prompt: Ids,
        output: int,
        *,
        is_head: bool = False,
        queue_deadline_us: int | None = None,
    ) -> None:
        """Queue one request with what the policies order by; the head goes first by all of them."""
        self._submitted += 1
        number, policy = self._submitted, self.case.policy
        priority = -1 if is_head else number % 5
        due = self._now + 900_000 + (0 if is_head else 1 + number * 7919 % 100_000)
        self._live.append(
            scheduler.submit(
                prompt,
                max_tokens=output,
                priority=priority if policy == "priority" else 0,
                tenant=HEAD if is_head else f"tenant {number % TENANTS}",
                queue_deadline_us=queue_deadline_us,
                deadline_us=due if policy == "deadline" else None,
                now_us=self._now,
            )
        )

    def _length(self) -> int:
        """Steps before an episode begins again."""
        if self.case.case == "head_retried":
            return 1024 if self._is_long else 64
        if self.case.case == "turnover":  # a fresh pool stays fresh while it hands out blocks that were never used
            return max(64, min(8192, self.num_blocks // (2 * (self.case.running // BLOCK_SIZE + PROMPT // BLOCK_SIZE + 4))))
        if not self._is_long:
            return 256
        rows = min(LONGEST, (self.num_blocks // self._rows - 1) * BLOCK_SIZE)
        return max(256, rows - (PROMPT + BLOCK_SIZE) - WARM_UP - 8)

    def _tight_pool(self) -> int:
        """Blocks for what runs and what it grows by; the head asks for one more than are left."""
        each = (PROMPT + BLOCK_SIZE) // BLOCK_SIZE + 1 + (self._lasts + WARM_UP) // BLOCK_SIZE + 1
        return 1 + self.case.running * each
