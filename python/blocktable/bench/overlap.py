"""Times whole steps beside a model that takes its time on a thread of its own: what planning ahead hides.

Before: `blocktable bench scheduler --overlap`. After: one row for depth 1 and one for depth 2. The model is a device that takes
`MODEL_MS` for each step and runs steps back to back, like a GPU with a queue; its answers are random ids. `period` is the time
from one commit to the next, by the wall clock.
"""

import queue
import threading
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from .._core import Plan, Scheduler
from .clock import quantiles_us
from .load import BLOCK_SIZE, VOCAB_SIZE, Answers, prompt_rows
from .row import Row, check

MODEL_MS = 10
PROMPT = 33


@dataclass(slots=True)
class Device:
    """Takes `seconds` for each step, one after the other. `launch` never waits; `wait` does, for the oldest step launched."""

    seconds: float
    _launched: "queue.SimpleQueue[float | None]" = field(default_factory=queue.SimpleQueue)
    _done: "queue.SimpleQueue[float]" = field(default_factory=queue.SimpleQueue)
    _thread: threading.Thread = field(init=False)

    def __post_init__(self) -> None:
        self._thread = threading.Thread(target=self._run, name="fake model", daemon=True)
        self._thread.start()

    def launch(self) -> None:
        """Queue one step."""
        self._launched.put(time.perf_counter())

    def wait(self) -> None:
        """Until the oldest step that was launched has ended."""
        self._done.get()

    def close(self) -> None:
        """End the thread."""
        self._launched.put(None)
        self._thread.join()

    def _run(self) -> None:
        end = 0.0
        while (start := self._launched.get()) is not None:
            end = max(start, end) + self.seconds
            while (left := end - time.perf_counter()) > 0:
                time.sleep(left)
            self._done.put(end)


def overlap_rows(running: int, steps: int, *, model_ms: float = MODEL_MS) -> Iterator[Row]:
    """One row per depth, checked before it is timed."""
    for depth in (1, 2):
        _check_answers(min(running, 64), depth)
        period_ns = _time_periods(running, depth, steps, model_ms / 1000)
        keys: Row = {"bench": "scheduler", "case": "overlap", "running": running, "overlap_depth": depth, "model_ms": model_ms}
        yield {**keys, "steps": steps, **quantiles_us("period", period_ns)}


def _scheduler(running: int, depth: int, outputs: int) -> Scheduler:
    scheduler = Scheduler(
        num_blocks=1 + running * ((PROMPT + outputs) // BLOCK_SIZE + 2),
        block_size=BLOCK_SIZE,
        vocab_size=VOCAB_SIZE,
        max_model_len=PROMPT + outputs + 1,
        max_num_seqs=running,
        max_num_batched_tokens=running * PROMPT,
        max_waiting=running,
        overlap_depth=depth,
    )
    for prompt in prompt_rows(running, PROMPT, np.random.default_rng(0)):
        scheduler.submit(prompt, max_tokens=outputs)
    return scheduler


def _time_periods(running: int, depth: int, steps: int, seconds: float) -> NDArray[np.int64]:
    """Nanoseconds from commit to commit, `steps` of them, while every sequence decodes."""
    scheduler = _scheduler(running, depth, steps + 16)
    answers, device, flying = Answers.of(running, np.random.default_rng(1)), Device(seconds), deque[Plan]()
    times = np.empty(steps + 9, np.int64)
    try:
        for i in range(len(times)):
            while len(flying) < depth:
                flying.append(scheduler.plan(0))
                device.launch()
            device.wait()
            done = answers.commit(scheduler, flying.popleft())
            times[i] = time.perf_counter_ns()
            check(holds=done.num_accepted == running, what=f"{running} tokens a step, found {done.num_accepted}")
    finally:
        device.close()
    return np.diff(times)[8:]


def _check_answers(running: int, depth: int) -> None:
    """Every sequence gets its outputs and no more, and a token that was not known is named by the sample that brings it."""
    outputs = 3 * BLOCK_SIZE
    scheduler = _scheduler(running, depth, outputs)
    answers, flying = Answers.of(running, np.random.default_rng(2)), deque[Plan]()
    last: dict[int, int] = {}
    accepted = ended = 0
    while ended < running:
        while len(flying) < depth:
            plan = scheduler.plan(0)
            if plan.num_seqs == 0:
                break
            _check_sources(plan, flying[-1].sample_requests.tolist() if flying else [], last)
            flying.append(plan)
        oldest = flying.popleft()
        last = dict(zip(oldest.sample_requests.tolist(), answers.of_step(oldest.step).tolist()))
        done = answers.commit(scheduler, oldest)
        accepted, ended = accepted + done.num_accepted, ended + len(done.ended)
    check(holds=not flying and accepted == running * outputs, what=f"{running * outputs} tokens in all, found {accepted}")
    scheduler.plan(0)
    scheduler.audit()
    check(holds=len(scheduler.free_queue()) == scheduler.config["num_blocks"] - 1, what="every block came back")


def _check_sources(plan: Plan, before: list[int], last: dict[int, int]) -> None:
    """An input is what was committed for its sequence, or is named as what the step in flight brings for that sequence."""
    rows = zip(plan.sample_requests.tolist(), plan.token_ids[plan.sample_rows], plan.token_sources[plan.sample_rows])
    for request, token, source in rows:
        if before:
            check(holds=before[source] == request, what=f"sample {source} of the step before is of request {request}")
        else:
            check(holds=source == -1 and last.get(request, token) == token, what="a committed id is the next input")
