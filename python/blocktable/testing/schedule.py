"""A schedule: what happens to a scheduler, in which order, chosen by one seed. SCHED(seed) of the fault catalogue.

Before: a seed. After: a `Report` of what was met on the way, or the first broken promise, with the seed in a note.
What always holds: the same seed gives the same calls in the same order and, since the core decides by nothing else, the
same plans bit for bit (`Report.digest`). Every case is small on purpose: in a pool of a few blocks everything collides.
"""

import hashlib
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from blocktable import _core
from blocktable.errors import (
    BlocktableError,
    InvalidInputError,
    NeverFitsError,
    QueueFullError,
    StepInFlightError,
    WrongStepError,
)

from .ahead_driver import AheadDriver
from .audit import REFUSALS, BrokenPromise, Snapshot
from .driver import Driver, Request, Turn
from .oracle import cold

VOCAB_SIZE = 50_021
"""Large enough that a wrong row cannot hide behind an equal token."""


_ABORTED = (_core.END_ABORTED, _core.END_ABORTED_CAPACITY, _core.END_ABORTED_DEADLINE)


@dataclass(frozen=True, slots=True)
class Case:
    """What a seed stands for: the scheduler's configuration, and how likely each event is before each step."""

    seed: int
    config: dict[str, Any]
    alphabet: int  # prompts are of so many different tokens: with few, equal blocks stand behind different parents
    num_requests: int
    longest_prompt: int
    longest_output: int
    arrivals: float  # expected number of new requests before a step
    abort: float
    finish: float
    fail: float
    withhold: float  # the chance that the model brings no token for an entry
    nuisance: float  # calls that must be refused and change nothing
    reset: float
    deadline: float  # the chance that a request has one, and the same for one to be admitted by


@dataclass(frozen=True, slots=True)
class Report:
    """What one schedule met, so that a run of many can show that all of it was met."""

    seed: int
    steps: int
    submitted: int
    refused: int
    finished: int
    aborted: int
    ended_for_capacity: int
    expired: int  # by either deadline
    preemptions: int
    failed_steps: int
    cached_tokens: int
    work: int  # tokens of all requests, prompt and most outputs: what a step bound is measured in
    digest: bytes


def case_of(seed: int) -> Case:
    """The case that a seed stands for. The pool is sized by the longest request, so that there is hardly ever room for all."""
    rng = random.Random(seed)
    block_size = rng.choice((1, 2, 3, 4, 4, 7, 8, 16))
    longest_prompt = rng.choice((4, 12, 12, 40))
    longest_output = rng.choice((1, 4, 12, 24, 40))
    longest = longest_prompt + longest_output
    usable = max(2, round(longest * rng.choice((0.5, 0.8, 1, 1, 1.3, 2, 4)) / block_size))
    config: dict[str, Any] = {
        "num_blocks": usable + 1,
        "block_size": block_size,
        "vocab_size": VOCAB_SIZE,
        "max_model_len": max(2, rng.choice((longest, longest, longest // 2, usable * block_size + 3))),
        "max_num_seqs": rng.choice((1, 2, 3, 5, 8)),
        "max_num_batched_tokens": rng.choice((1, 2, 4, 8, 8, 30, 200, 200)),
        "max_waiting": rng.choice((2, 8, 64)),
        "long_prefill_threshold": rng.choice((0, 0, 1, 3, 8)),
        "max_preemptions": rng.choice((1, 2, 16)),
        "enable_prefix_caching": rng.random() < 0.85,
        "hash_seed": rng.choice((b"", b"seed")),
    }
    groups = _groups_of(seed)
    if groups != (None,):
        config |= {"groups": groups, "num_blocks": 1 + usable * (1 + len(groups)) // 2}
    config |= _rules_of(seed, config["num_blocks"] - 1)
    return Case(
        seed=seed,
        config=config,
        alphabet=rng.choice((2, VOCAB_SIZE, VOCAB_SIZE, VOCAB_SIZE)),
        num_requests=rng.choice((3, 8, 20)),
        longest_prompt=longest_prompt,
        longest_output=longest_output,
        arrivals=rng.choice((0.2, 0.7, 2.0)),
        abort=rng.choice((0.0, 0.02, 0.1)),
        finish=rng.choice((0.0, 0.03)),
        fail=rng.choice((0.0, 0.0, 0.05, 0.25)),
        withhold=rng.choice((0.0, 0.0, 0.2)),
        nuisance=rng.choice((0.0, 0.05)),
        reset=rng.choice((0.0, 0.0, 0.02)),
        deadline=rng.choice((0.0, 0.0, 0.2)),
    )


def _groups_of(seed: int) -> tuple[int | None, ...]:
    """The windows of a case's groups: one in two cases has one group that sees everything."""
    rng = random.Random(f"groups of {seed}")
    if rng.random() < 0.5:
        return (None,)
    return tuple(rng.choice((None, rng.randint(1, 24), rng.randint(1, 8))) for _ in range(rng.choice((1, 2, 2, 3))))


def _rules_of(seed: int, usable: int) -> dict[str, Any]:
    """Whose turn it is and who may hold how much: one case in three has the default rules."""
    rng = random.Random(f"rules of {seed}")
    if rng.random() < 1 / 3:
        return {}
    no_evict = rng.random() < 0.2
    policy = rng.choice(("fcfs", "priority", "fair", "deadline", "prefix"))
    quota = {"hard_blocks": rng.randint(max(1, usable // 2), usable), "soft_blocks": rng.randint(0, usable)}
    return {
        "policy": policy,
        "ageing_us": rng.choice((1, 20, 1_000_000)),
        "latest_deadline_us": rng.choice((10, 1000)),
        "prefix_band": rng.choice((1, 4, 1024)),
        "max_pass": rng.choice((0, 1, 8)),
        "watermark": rng.choice((0, 0, min(1, usable - 1), usable // 4)),
        "estimate_growth": rng.random() < 0.5,
        "no_evict": no_evict,
        "preempt_for_waiting": policy == "priority" and not no_evict and rng.random() < 0.5,
        "tenants": {"b": {"weight": 4}, "c": quota} if rng.random() < 0.5 else {},
    }


def run_schedule(seed: int, *, recounts: bool = True, overlap_depth: int = 1) -> Report:
    """Play the case of `seed` to its end. Raises what breaks first, with the seed in a note.

    overlap_depth: 2 = the caller makes the next plan before the last step's commit.

    recounts: count from outside too, after every call; the core's own audit runs in any case.
    """
    try:
        if overlap_depth > 1:
            return _PlayAhead(case_of(seed), overlap_depth, recounts=recounts).run()
        return _Play(case_of(seed), recounts=recounts).run()
    except Exception as error:
        depth = f", overlap_depth={overlap_depth}" if overlap_depth > 1 else ""
        error.add_note(f"to see it again: blocktable.testing.run_schedule({seed}{depth})")
        raise


class _Play:
    """One run of a case."""

    def __init__(self, case: Case, *, recounts: bool) -> None:
        self.case = case
        self.driver = Driver(case.config, recounts=recounts)
        self.rng = random.Random(case.seed ^ 0x5CED)
        self.left = case.num_requests
        self.refused = 0
        self.work = 0
        length = case.longest_prompt + case.longest_output
        self.roots = [self._random_tokens(length) for _ in range(self.rng.choice((1, 2, 3)))]

    def run(self) -> Report:
        while self.left or self.driver.live:
            if self.driver.steps > self._step_bound():
                raise BrokenPromise("progress", f"{self.driver.steps} steps for {self.work} tokens of work")
            self._step()
        self.driver.drain()
        self._check_counters()
        return self._report()

    def _step_bound(self) -> int:
        """So many steps are enough for all work so far, one token a step, each token computed several times over."""
        return 100 + 3 * self.work

    def _step(self) -> None:
        """Events, a plan, events while it is in flight, and its result or its failure."""
        self._arrive()
        self._interfere()
        if self.driver.plan().num_seqs == 0:
            return
        self._interfere()
        if self._happens(self.case.fail):
            self.driver.fail()
            return
        ids, starts = self.driver.forward()
        self._interfere()
        kept = np.array([not self._happens(self.case.withhold) for _ in ids], np.bool_)
        self.driver.commit(ids[kept], np.concatenate(([0], np.cumsum(kept))).astype(starts.dtype))

    def _arrive(self) -> None:
        count = int(self.case.arrivals) + self._happens(self.case.arrivals % 1)
        for _ in range(min(count, self.left)):
            self.left -= 1
            self._submit()

    def _interfere(self) -> None:
        if self.driver.live and self._happens(self.case.abort):
            self.driver.abort(self._anyone())
        if self.driver.live and self._happens(self.case.finish):
            self.driver.finish(self._anyone())
        if self._happens(self.case.reset):
            self.driver.reset_prefix_cache()
        if self.left and self._happens(self.case.arrivals / 8):
            self.left -= 1
            self._submit()
        if self._happens(self.case.nuisance):
            self._refused_call()

    def _submit(self) -> None:
        prompt = self._prompt()
        longest = self.case.longest_output
        limit = longest if self._happens(0.4) else self.rng.randint(1, longest)
        least = self.rng.randint(0, limit) if self._happens(0.2) else 0
        answer = cold(prompt, limit, vocab_size=VOCAB_SIZE, windows=self.driver.windows)
        stops = self.rng.sample(answer, k=min(2, limit)) if self._happens(0.3) else []
        turn, before = self._turn(), Snapshot.of(self.driver.scheduler)
        try:
            self.driver.submit(prompt, max_tokens=limit, min_tokens=least, stop_token_ids=stops, turn=turn)
        except (NeverFitsError, QueueFullError, InvalidInputError) as refusal:
            self.refused += 1
            self._check_refusal(refusal, prompt, turn)
            before.check_unchanged(self.driver.scheduler, except_for=REFUSALS)
        else:
            self.work += len(prompt) + limit
            self._check_fits(len(prompt), least, turn)

    def _turn(self) -> Turn:
        tenant = self.rng.choice((None, "a", "b", "c"))
        has_classes = self.case.config.get("policy") == "priority"
        return Turn(
            tenant=tenant,
            priority=self.rng.randint(-3, 3) if has_classes else 0,
            queue_deadline_us=self._deadline(),
            deadline_us=self._deadline(),
        )

    def _deadline(self) -> int | None:
        """Some calls from now, if there is one."""
        return self.driver.now_us + self.rng.choice((2, 10, 50, 300)) if self._happens(self.case.deadline) else None

    def _check_refusal(self, refusal: BlocktableError, prompt: list[int], turn: Turn) -> None:
        """Nobody may be refused who would have been served."""
        config, scheduler = self.case.config, self.driver.scheduler
        limits = self._usable(turn)
        if isinstance(refusal, QueueFullError):
            if scheduler.num_waiting < config["max_waiting"]:
                raise BrokenPromise("refusal", f"{scheduler.num_waiting} wait, and the queue is said to be full")
        elif isinstance(refusal, NeverFitsError):
            if refusal.needed <= refusal.usable or refusal.usable not in limits:
                raise BrokenPromise("refusal", f"{refusal}; it may hold {limits}")
        elif len(prompt) < config["max_model_len"]:
            raise BrokenPromise("refusal", f"a prompt of {len(prompt)} tokens was refused: {refusal}")

    def _check_fits(self, prompt_len: int, min_tokens: int, turn: Turn) -> None:
        """Nobody may be taken in who can never be served: the rows of the prompt and of the outputs that must be made."""
        config = self.case.config
        rows = min(prompt_len + max(1, min_tokens) - 1, config["max_model_len"] - 1)
        needed = sum(self._most_blocks(window, rows) for window in self.driver.windows)
        if needed > min(self._usable(turn)):
            raise BrokenPromise("refusal", f"{rows} rows were taken in, which need {needed} blocks; the pool has {config}")

    def _usable(self, turn: Turn) -> tuple[int, ...]:
        """Blocks that a request may ever hold: what I17 leaves of the pool, and the quota of its tenant, if there is one."""
        config = self.case.config
        usable: int = config["num_blocks"] - 1 - config.get("watermark", 0)
        rules: dict[str, int] = config.get("tenants", {}).get(turn.tenant, {})
        return (usable, rules["hard_blocks"]) if "hard_blocks" in rules else (usable,)

    def _most_blocks(self, window: int | None, rows: int) -> int:
        """Blocks that a request of `rows` rows holds at once in a group, wherever a step begins."""
        config = self.case.config
        size: int = config["block_size"]
        all_of_it = -(-rows // size)
        if window is None:
            return all_of_it
        chunk: int = min(config["max_num_batched_tokens"], config["long_prefill_threshold"] or rows)
        starts = range(window, window + size)
        return min(all_of_it, max((at + chunk - 1) // size - (at + 1 - window) // size + 1 for at in starts))

    def _prompt(self) -> list[int]:
        """Most prompts begin like another one: a root, an earlier prompt, or an earlier prompt with its answer."""
        length = self.rng.randint(1, self.case.longest_prompt)
        shared = self.rng.choice(self.roots)
        if self.driver.requests and self._happens(0.4):
            shared = self.rng.choice(list(self.driver.requests.values())).tokens
        kept = self.rng.choice((0, length // 2, length, length))
        start = shared[:kept]
        return start + self._random_tokens(max(0, length - len(start)))

    def _refused_call(self) -> None:
        """One call that must be refused, by its type, and change nothing."""
        scheduler, plan = self.driver.scheduler, self.driver.plan_in_flight
        before = Snapshot.of(scheduler)
        if plan is None:
            self._must_raise(WrongStepError, lambda: scheduler.fail(1 << 40))
        else:
            count = len(plan.sample_rows)
            ids, starts = np.zeros(count, np.int64), np.arange(count + 1, dtype=np.int64)
            step = plan.step
            self._must_raise(StepInFlightError, lambda: scheduler.plan(0))
            self._must_raise(WrongStepError, lambda: scheduler.commit(step + 1, ids, starts, 0))
            self._must_raise(InvalidInputError, lambda: scheduler.commit(step, ids, np.arange(count + 2), 0))
            if count:
                self._must_raise(InvalidInputError, lambda: scheduler.commit(step, ids + VOCAB_SIZE, starts, 0))
        ended = [request for request in self.driver.requests.values() if request.end is not None]
        if ended and self.driver.abort(self.rng.choice(ended)):
            raise BrokenPromise("A6", "a request that had ended was aborted")
        before.check_unchanged(scheduler)

    def _must_raise(self, kind: type[BlocktableError], call: Callable[[], object]) -> None:
        try:
            call()
        except kind:
            return
        raise BrokenPromise("refusal", f"{kind.__name__} was not raised")

    def _check_counters(self) -> None:
        """The counters are what the books say; a retry or a recompute counts no second query."""
        requests, stats = self.driver.requests.values(), self.driver.scheduler.stats()
        seen = [request for request in requests if request.cached is not None]
        wanted = {
            "submitted": len(requests),
            "refused": self.refused,
            "aborted": sum(request.end in _ABORTED for request in requests),
            "expired": sum(request.end == _core.END_ABORTED_DEADLINE for request in requests),
            "queue_expired": sum(request.end == _core.END_REFUSED_QUEUE_DEADLINE for request in requests),
            "finished": sum(request.end in (_core.END_FINISHED_STOP, _core.END_FINISHED_LENGTH) for request in requests),
            "preemptions": sum(request.preempted for request in requests),
            "steps": self.driver.steps,
            "prefix_queries": sum(len(request.prompt) for request in seen),
        }
        self._compare(stats, wanted | self._counters_of_steps())

    def _counters_of_steps(self) -> dict[str, int]:
        """Those that follow from what each step computed."""
        requests = self.driver.requests.values()
        return {
            "scheduled_tokens": sum(request.computed for request in requests),
            "prefix_hits": sum(request.cached or 0 for request in requests),
        }

    def _compare(self, stats: dict[str, int], wanted: dict[str, int]) -> None:
        for name, value in wanted.items():
            if stats[name] != value:
                raise BrokenPromise("counters", f"{name} is {stats[name]}, the books say {value}")

    def _report(self) -> Report:
        stats, requests = self.driver.scheduler.stats(), self.driver.requests.values()
        return Report(
            seed=self.case.seed,
            steps=self.driver.steps,
            submitted=len(requests),
            refused=self.refused,
            finished=stats["finished"],
            aborted=sum(request.end == _core.END_ABORTED for request in requests),
            ended_for_capacity=sum(request.end == _core.END_ABORTED_CAPACITY for request in requests),
            expired=stats["expired"] + stats["queue_expired"],
            preemptions=stats["preemptions"],
            failed_steps=stats["failed_steps"],
            cached_tokens=stats["prefix_hits"],
            work=self.work,
            digest=hashlib.sha256(self.driver.snapshot_trace()).digest(),
        )

    def _anyone(self) -> Request:
        return self.rng.choice(list(self.driver.live.values()))

    def _random_tokens(self, count: int) -> list[int]:
        return [self.rng.randrange(self.case.alphabet) for _ in range(count)]

    def _happens(self, probability: float) -> bool:
        return self.rng.random() < probability


class _PlayAhead(_Play):
    """One run of a case whose caller plans ahead."""

    driver: AheadDriver

    def __init__(self, case: Case, overlap_depth: int, *, recounts: bool) -> None:
        super().__init__(case, recounts=recounts)
        self.driver = AheadDriver(case.config | {"overlap_depth": overlap_depth}, recounts=recounts)

    def _step(self) -> None:
        """Events, a plan if one more may be made, and now and then the result, or the failure, of the oldest step."""
        self._arrive()
        self._interfere()
        if self.driver.may_plan() and self._happens(0.8):
            self.driver.plan()
            self._interfere()
        if not self.driver.flying or (self.driver.may_plan() and self._happens(0.7)):
            return
        if self._happens(self.case.fail):
            self.driver.fail_oldest()
            return
        samples = range(len(self.driver.flying[0].plan.sample_rows))
        self.driver.commit_oldest(withheld=frozenset(i for i in samples if self._happens(self.case.withhold)))

    def _counters_of_steps(self) -> dict[str, int]:
        """Which results were dropped is the scheduler's to say, so this cannot be counted from outside."""
        return {}
