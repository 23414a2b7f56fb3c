"""Promise: a steady step makes no Python object that the garbage collector has to know for each request, and its books say what
the step brought: the engine's loop around a model that does nothing."""

import gc
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

from blocktable import LLM, SamplingParams

from .conftest import MakeLLM
from .faults import loop_of
from .tiny_llama import VOCAB_SIZE
from .ways import check_empty

ROWS = 64
STEPS = 100


class StillModel:
    """Gives every row the same logits: token 7 is best."""

    def __init__(self) -> None:
        self.logits = torch.zeros(ROWS, VOCAB_SIZE)
        self.logits[:, 7] = 1.0

    def forward(self, plan: Any) -> torch.Tensor:
        return self.logits[: len(plan.sample_rows)]


@pytest.fixture
def still(make_llm: MakeLLM) -> LLM:
    llm = make_llm(num_blocks=4000, max_num_seqs=ROWS, max_num_batched_tokens=2 * ROWS)
    loop_of(llm)._runner = StillModel()
    return llm


@dataclass(frozen=True)
class Made:
    """What some steps made that the garbage collector has to know."""

    kept: int
    """Objects that are still there."""
    counted: int
    """By how much they brought the next collection nearer."""


def made_by_steps(llm: LLM, steps: int) -> Made:
    gc.collect()
    gc.disable()
    try:
        objects, count = len(gc.get_objects()), gc.get_count()[0]
        for _ in range(steps):
            llm.step()
        counted = gc.get_count()[0] - count
        return Made(len(gc.get_objects()) - objects, counted)
    finally:
        gc.enable()


def start(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=STEPS + 60, ignore_eos=True, seed=1)
    for place in range(ROWS):
        llm.add_request({"prompt_token_ids": [place + 1] * 9}, params)
    for _ in range(20):
        llm.step()
    assert llm.scheduler.num_running == ROWS


def test_a_steady_step_leaves_no_object_behind(still: LLM) -> None:
    start(still)
    made = made_by_steps(still, STEPS)
    print(f"{STEPS} steps of {ROWS} requests: {made}")
    assert made.kept < 10
    assert made.counted <= 2 * STEPS, "at most two a step, however many requests there are"
    outputs = []
    while still.has_unfinished_requests():
        outputs += still.step()
    assert len(outputs) == ROWS
    assert all(output.outputs[0].token_ids == [7] * (STEPS + 60) for output in outputs)
    check_empty(still)


def test_an_object_for_each_request_would_be_seen(still: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """The check above can fail: books that keep one list for each token."""
    from blocktable.engine.output_rows import OutputRows

    kept: list[Any] = []
    real = OutputRows.append

    def append(self: OutputRows, rows: Any, ids: np.ndarray, now_ns: int) -> None:
        kept.extend([token] for token in ids.tolist())
        real(self, rows, ids, now_ns)

    monkeypatch.setattr(OutputRows, "append", append)
    start(still)
    made = made_by_steps(still, STEPS)
    # Objects of tests before this one may go meanwhile.
    assert made.kept > ROWS * STEPS / 2
    assert made.counted > ROWS * STEPS / 2


def test_plan_and_commit_are_timed_once_a_step(still: LLM) -> None:
    start(still)
    loop = loop_of(still)
    assert loop.times._count == still.scheduler.stats()["steps"]
    assert (loop.times._ring[:, : loop.times._count] > 0).all()
