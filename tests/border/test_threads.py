"""Any method may be called from any thread at any time: refused at worst, never a panic, a borrow error or a deadlock.

Field fault 139. The calls are random but seeded; what the threads left behind is audited and then drained.
"""

import threading
import time
from collections import Counter
from collections.abc import Callable

import numpy as np
import pytest

from blocktable import BlockHasher, BlocktableError, Scheduler, _core

THREADS = 16
SECONDS, MOST_SECONDS = 4, 60
ONE_EACH = np.arange(65)


class Caller(threading.Thread):
    """Calls random methods until told to stop; keeps what was refused, and what should never have been raised."""

    def __init__(self, scheduler: Scheduler, seed: int, stop: threading.Event) -> None:
        super().__init__(daemon=True)
        self.scheduler, self.stop = scheduler, stop
        self.rng = np.random.default_rng(seed)
        self.hasher = BlockHasher(block_size=4)
        self.plan = None
        self.refused: Counter[str] = Counter()
        self.next_event = 0
        self.pins: list[int] = []
        self.done: Counter[str] = Counter()
        self.broken: list[BaseException] = []

    def run(self) -> None:
        calls = [getattr(self, name) for name in dir(type(self)) if name.startswith("call_")]
        while not self.stop.is_set():
            call = calls[self.rng.integers(len(calls))]
            try:
                call()
                self.done[call.__name__] += 1
            except BlocktableError as error:
                self.refused[type(error).__name__] += 1
            except BaseException as error:
                self.broken.append(error)
                return

    def some_request(self) -> int:
        return int(self.rng.integers(0, 4000))

    def call_submit(self):
        self.scheduler.submit(self.rng.integers(0, 100, int(self.rng.integers(1, 40))), max_tokens=int(self.rng.integers(1, 8)))

    def call_plan(self):
        self.plan = self.scheduler.plan(0)

    def call_plan_arrays(self):
        if self.plan is not None:
            for name in dir(self.plan):
                if not name.startswith("_"):
                    np.array(getattr(self.plan, name))
            self.plan.prefix_groups()

    def call_commit(self):
        if self.plan is not None:
            wanted = len(self.plan.sample_rows)
            done = self.scheduler.commit(self.plan.step, self.rng.integers(0, 100, wanted), ONE_EACH[: wanted + 1], 0)
            len(done.ended), done.num_accepted, done.step

    def call_fail(self):
        if self.plan is not None and self.rng.random() < 0.1:
            self.scheduler.fail(self.plan.step)

    def call_abort(self):
        self.scheduler.abort(self.some_request())

    def call_finish(self):
        self.scheduler.finish(self.some_request())

    def call_fork(self):
        self.scheduler.fork(self.some_request(), max_tokens=int(self.rng.integers(1, 9)))

    def call_truncate(self):
        self.scheduler.truncate(self.some_request(), int(self.rng.integers(1, 30)))

    def call_end_sequence(self):
        self.scheduler.end_sequence(self.some_request())

    def call_propose(self):
        row = np.array([int(self.rng.integers(0, 5))])
        self.scheduler.propose(row, np.array([0, 2]), self.rng.integers(0, 100, 2))

    def call_read(self):
        scheduler = self.scheduler
        scheduler.stats(), scheduler.config, scheduler.num_running, scheduler.num_waiting, scheduler.free_queue()
        scheduler.block_refs(), scheduler.published_blocks(), repr(scheduler), _core.allocations()
        scheduler.block_map(), scheduler.block_namings(int(self.rng.integers(64)))

    def call_cached(self):
        self.scheduler.num_cached_tokens(self.some_request())

    def call_audit(self):
        if self.rng.random() < 0.1:
            self.scheduler.audit()

    def call_reset(self):
        if self.rng.random() < 0.02:
            self.scheduler.reset_prefix_cache()

    def call_submit_as(self):
        tokens = self.rng.integers(0, 100, 20)
        tenant = str(self.rng.integers(0, 3))
        identity = {"public_tokens": 9, "adapter": ("a", 1), "cache_salt": [(10, 12, "s")]}
        self.scheduler.submit(tokens, max_tokens=2, domain=tenant, **identity)

    def call_weights(self):
        if self.rng.random() < 0.05:
            self.scheduler.set_weights_version(str(self.rng.integers(0, 2)))
        self.scheduler.miss_reason(self.some_request())
        self.scheduler.is_mixed(self.some_request())

    def call_events(self):
        came = self.scheduler.read_events(self.next_event)
        if came is not None:
            self.next_event = int.from_bytes(came[:8], "little")
        if self.rng.random() < 0.02:
            self.scheduler.event_snapshot()

    def call_pins(self):
        if self.pins and self.rng.random() < 0.5:
            self.scheduler.unpin(self.pins.pop())
        self.scheduler.submit([1] * 9, max_tokens=1)
        self.pins.append(self.scheduler.pin([1] * 9)[0])

    def call_explain(self):
        self.scheduler.explain(self.some_request())

    def call_notes(self):
        if self.rng.random() < 0.1:
            self.scheduler.listen_to_notes(int(self.rng.integers(0, 64)))
        self.scheduler.take_notes()

    def call_recording(self):
        self.scheduler.flush_recording()
        if self.rng.random() < 0.02:
            self.scheduler.recorded()

    def call_record(self):
        """Refused: only a scheduler that has seen nothing can be recorded."""
        if self.rng.random() < 0.5:
            self.scheduler.keep_recording(1 << 16)
        else:
            self.scheduler.start_recording("/nowhere/at/all")

    def call_hasher(self):
        self.hasher.keys(self.rng.integers(0, 100, 16))

    def call_bad(self):
        self.scheduler.submit([-1], max_tokens=1)


MUST_SUCCEED = {name for name in dir(Caller) if name.startswith("call_")} - {"call_bad", "call_record"}


def run_together(scheduler: Scheduler, seed: int) -> list[Caller]:
    """Let threads call for some seconds, and on until every method has succeeded, however slow the machine is."""
    stop = threading.Event()
    callers = [Caller(scheduler, seed + i, stop) for i in range(THREADS)]
    for caller in callers:
        caller.start()
    for second in range(MOST_SECONDS):
        if second >= SECONDS and {name for caller in callers for name in list(caller.done)} >= MUST_SUCCEED:
            break
        time.sleep(1)
    stop.set()
    for caller in callers:
        caller.join(timeout=30)
    assert not [caller for caller in callers if caller.is_alive()], "a thread hangs"
    return callers


def drain(scheduler: Scheduler, answer) -> None:
    """End all that lives; whatever step is in flight is failed first."""
    from blocktable import StepInFlightError

    try:
        plan = scheduler.plan(0)
    except StepInFlightError as error:
        scheduler.fail(error.step)
        plan = scheduler.plan(0)
    while plan.num_seqs:
        answer(scheduler, plan)
        plan = scheduler.plan(0)


@pytest.mark.timeout(120)
def test_sixteen_threads_calling_every_method_break_nothing(make_scheduler, answer, seed):
    scheduler = make_scheduler(max_waiting=64, explain_misses=True, event_buffer_size=16, pin_budget=8, max_draft_tokens=2)
    scheduler.keep_recording(1 << 16)
    callers = run_together(scheduler, seed)
    assert scheduler.stop_recording() > 0
    broken = [error for caller in callers for error in caller.broken]
    assert broken == []
    done = sum((caller.done for caller in callers), Counter())
    assert set(done) == MUST_SUCCEED, "some method never succeeded"
    scheduler.audit()
    for pin in (pin for caller in callers for pin in caller.pins):
        scheduler.unpin(pin)
    drain(scheduler, answer)
    scheduler.audit()
    assert (scheduler.num_running, scheduler.num_waiting) == (0, 0)
    assert len(scheduler.free_queue()) == 63
    assert not scheduler.block_refs()[1:].any()


def test_every_method_is_called_by_the_threads():
    """A new method that nobody adds to the callers is found here."""
    source = {
        "submit", "plan", "commit", "fail", "abort", "finish", "stats", "config", "num_running", "num_waiting", "free_queue",
        "block_refs", "published_blocks", "block_map", "block_namings", "num_cached_tokens", "audit", "reset_prefix_cache",
        "read_events", "event_snapshot", "set_weights_version", "is_mixed", "miss_reason", "pin", "unpin",
        "end_sequence", "fork", "truncate", "propose", "explain", "listen_to_notes", "take_notes", "recorded",
        "start_recording", "keep_recording", "flush_recording", "stop_recording",
    }  # fmt: skip
    assert {name for name in dir(Scheduler) if not name.startswith("_")} == source
    assert {name for name in dir(BlockHasher) if not name.startswith("_")} == {"keys"}


def test_the_results_of_one_thread_do_not_depend_on_others(make_scheduler, answer):
    """A scheduler that one thread drives beside fifteen busy ones answers as it does alone."""

    def drive() -> list[list[int]]:
        scheduler = make_scheduler()
        for i in range(6):
            scheduler.submit(list(range(i, i + 9)), max_tokens=12)
        seen = []
        while (plan := scheduler.plan(0)).num_seqs:
            seen.append([*plan.token_ids.tolist(), *plan.slot_mapping[0].tolist()])
            answer(scheduler, plan)
        return seen

    alone = drive()
    stop = threading.Event()
    others = [Caller(make_scheduler(), i, stop) for i in range(THREADS - 1)]
    for other in others:
        other.start()
    try:
        beside = drive()
    finally:
        stop.set()
        for other in others:
            other.join(timeout=30)
    assert beside == alone


def ticks_in_the_middle(work: Callable[[], object]) -> int:
    """How often another thread ran in the middle half of `work`. Were the interpreter held all the time, it could not run once,
    however slow or busy the machine is."""
    ticks: list[float] = []
    stop = threading.Event()

    def tick() -> None:
        while not stop.is_set():
            ticks.append(time.perf_counter())
            time.sleep(0.0005)

    ticker = threading.Thread(target=tick, daemon=True)
    ticker.start()
    start = time.perf_counter()
    work()
    end = time.perf_counter()
    stop.set()
    ticker.join(timeout=30)
    quarter = (end - start) / 4
    return sum(start + quarter < moment < end - quarter for moment in ticks)


def lets_others_run(work: Callable[[], object]) -> bool:
    """Whether another thread gets its turn while `work` runs, in one of five attempts: on a busy machine it may miss some."""
    return any(ticks_in_the_middle(work) >= 3 for _ in range(5))


@pytest.mark.timeout(120)
def test_a_long_submission_does_not_stop_other_threads(make_scheduler):
    """Work over ten microseconds lets go of the interpreter (field fault 140): a ticking thread keeps ticking."""
    scheduler = make_scheduler(num_blocks=400_000, block_size=16, max_model_len=4_000_000, max_num_seqs=1, vocab_size=32_000)
    prompt = np.random.default_rng(0).integers(0, 32_000, 3_000_000)
    assert lets_others_run(lambda: scheduler.submit(prompt, max_tokens=1))


@pytest.mark.timeout(120)
def test_a_call_that_keeps_the_interpreter_is_noticed():
    """The control of the test above: a long sum is one call that never lets go of the interpreter."""
    assert not lets_others_run(lambda: sum(range(30_000_000)))
