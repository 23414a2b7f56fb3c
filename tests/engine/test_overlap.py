"""Promise: with `overlap_depth=2` the next step is planned while the model runs, and nothing else changes: the same text, the
same ends, nothing left over; a failure, an interrupt or an abort in between costs what was under way and no more."""

import asyncio
import os
import random
import signal
import threading
from contextlib import aclosing
from typing import Any

import numpy as np
import pytest
import torch

from blocktable import LLM, RequestOutput, RequestOutputKind, SamplingParams
from blocktable.engine import step_loop
from blocktable.engine.model_runs import ThreadRun

from .conftest import MakeAsync, MakeLLM
from .faults import changing, faulty_model, interrupted_after, loop_of, raising
from .test_async_llm import greedy, read, settle
from .ways import check_empty

PROMPTS: list[Any] = [
    {"prompt_token_ids": list(range(first, first + length))} for first, length in ((1, 5), (40, 20), (40, 30), (90, 9))
]
EIGHT = greedy(max_tokens=8)
DRAWN = SamplingParams(temperature=1.0, seed=5, max_tokens=24, ignore_eos=True)

WAYS: dict[str, dict[str, Any]] = {
    "plain": {},
    "chunks": {"max_num_batched_tokens": 8},
    "a small pool": {"num_blocks": 12, "max_num_batched_tokens": 16},
    "one row": {"max_num_seqs": 1},
    "no cache": {"enable_prefix_caching": False},
    "by priority": {"policy": "priority"},
}

ASKED: dict[str, SamplingParams] = {
    "greedy": greedy(max_tokens=20),
    "drawn": DRAWN,
    "one token": greedy(max_tokens=1),
    "min tokens": SamplingParams(temperature=1.0, seed=3, max_tokens=24, min_tokens=9, stop_token_ids=list(range(60, 120))),
    "stop tokens": SamplingParams(temperature=1.0, seed=3, max_tokens=24, stop_token_ids=list(range(60, 120))),
    "stop strings": SamplingParams(temperature=1.0, seed=3, max_tokens=24, ignore_eos=True, stop=["e", "a", "t", "\x1d"]),
}


def told(outputs: list[RequestOutput]) -> list[tuple[Any, ...]]:
    answers = [output.outputs[0] for output in outputs]
    return [(answer.text, list(answer.token_ids), answer.finish_reason, answer.stop_reason) for answer in answers]


@pytest.mark.parametrize("way", WAYS)
def test_the_same_answers(way: str, make_llm: MakeLLM) -> None:
    one, two = make_llm(**WAYS[way]), make_llm(overlap_depth=2, **WAYS[way])
    for name, params in ASKED.items():
        assert told(two.generate(PROMPTS, params)) == told(one.generate(PROMPTS, params)), name
        check_empty(two)
    with two.stream(PROMPTS, ASKED["drawn"]) as stream:
        pieces = [(place, output) for place, output in stream]
    texts = ["".join(output.outputs[0].text for at, output in pieces if at == place) for place in range(len(PROMPTS))]
    assert texts == [text for text, _, _, _ in told(one.generate(PROMPTS, ASKED["drawn"]))]
    check_empty(two)


def test_the_next_step_is_planned_while_the_model_runs(make_llm: MakeLLM) -> None:
    llm = make_llm(overlap_depth=2)
    loop = loop_of(llm)
    sources: list[int] = []
    seen: list[bool] = []

    def look(plan: Any, forward: Any) -> torch.Tensor:
        """In the model, on its own thread: wait for the next plan, which can only be made meanwhile."""
        sources.append(int(plan.token_sources.max(initial=-1)))
        for _ in range(20_000):
            if loop._ahead is not None and loop._ahead[0].step != plan.step:
                break
            torch.empty(0).sum()
        seen.append(loop._ahead is not None)
        return forward()

    with faulty_model(llm, look):
        llm.generate(PROMPTS[0], EIGHT)
    assert all(seen)
    assert sources == [-1] + [0] * 7, "each token is filled in from the step before"


def test_tokens_that_are_not_filled_in_are_caught(make_llm: MakeLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """The check of the answers can fail."""
    monkeypatch.setattr(step_loop, "filled", lambda plan, before: plan.token_ids.astype(np.int64))
    with pytest.raises(AssertionError):
        test_the_same_answers("plain", make_llm)
    monkeypatch.undo()


@pytest.mark.parametrize("is_late", [False, True], ids=["before writing", "after writing"])
@pytest.mark.parametrize("failing", [{0}, {1}, {3}, {0, 1}, {2, 3, 6, 7}, set(range(0, 60, 2))], ids=str)
def test_a_failed_step_runs_again_to_the_same_text(failing: set[int], is_late: bool, make_llm: MakeLLM) -> None:
    options = {"max_num_batched_tokens": 16, "num_blocks": 12}
    right = told(make_llm(**options).generate(PROMPTS, DRAWN))
    llm = make_llm(overlap_depth=2, **options)
    with faulty_model(llm, raising(RuntimeError("out of memory"), is_late=is_late), failing):
        assert told(llm.generate(PROMPTS, DRAWN)) == right
    check_empty(llm)


def test_a_model_that_always_fails_ends_its_requests(make_llm: MakeLLM) -> None:
    llm = make_llm(overlap_depth=2)
    with faulty_model(llm, raising(RuntimeError("always"))):
        outputs = llm.generate(PROMPTS, EIGHT)
    assert [output.outputs[0].finish_reason for output in outputs] == ["error"] * 4
    check_empty(llm)


def test_logits_without_a_choice_end_their_own_request_only(make_llm: MakeLLM) -> None:
    right = told(make_llm().generate(PROMPTS, EIGHT))
    llm = make_llm(overlap_depth=2, max_num_batched_tokens=256)

    def spoil(plan: Any, logits: torch.Tensor) -> None:
        logits[1] = torch.nan

    with faulty_model(llm, changing(spoil), {3}):
        outputs = llm.generate(PROMPTS, EIGHT)
    assert [output.outputs[0].finish_reason for output in outputs].count("error") == 1
    assert [answer for answer in told(outputs) if answer[2] != "error"] == [right[place] for place in (0, 2, 3)]
    check_empty(llm)


@pytest.mark.parametrize("name", ["submit", "plan", "commit"])
@pytest.mark.parametrize("at", [0, 1, 3])
def test_an_interrupt_anywhere(name: str, at: int, make_llm: MakeLLM) -> None:
    right = told(make_llm().generate(PROMPTS, EIGHT))
    llm = make_llm(overlap_depth=2)
    with interrupted_after(llm, name, at), pytest.raises(KeyboardInterrupt):
        llm.generate(PROMPTS, EIGHT)
    check_empty(llm)
    with faulty_model(llm, raising(KeyboardInterrupt()), {at}), pytest.raises(KeyboardInterrupt):
        llm.generate(PROMPTS, EIGHT)
    check_empty(llm)
    assert told(llm.generate(PROMPTS, EIGHT)) == right


def interrupted_while_the_model_runs(llm: LLM) -> None:
    """A signal's handler raises an error of its own while the caller waits for the model."""
    is_running = threading.Event()

    def slow(plan: Any, forward: Any) -> torch.Tensor:
        is_running.set()
        threading.Event().wait(0.1)  # until the caller has planned ahead, and waits
        os.kill(os.getpid(), signal.SIGALRM)
        try:
            threading.Event().wait(0.1)
            return forward()
        finally:
            is_running.clear()

    def handle(number: int, frame: Any) -> None:
        raise TimeoutError("the caller's own limit")

    before = signal.signal(signal.SIGALRM, handle)
    try:
        with faulty_model(llm, slow, {2}), pytest.raises(TimeoutError, match="own limit"):
            llm.generate(PROMPTS, EIGHT)
    finally:
        signal.signal(signal.SIGALRM, before)
    assert not is_running.is_set(), "blocks are given to nobody while the model writes them"


@pytest.mark.skipif(not hasattr(signal, "SIGALRM"), reason="no such signal on this system")
def test_what_a_signal_raises_is_no_failure_of_the_model(make_llm: MakeLLM) -> None:
    llm = make_llm(overlap_depth=2)
    right = told(llm.generate(PROMPTS, EIGHT))
    interrupted_while_the_model_runs(llm)
    check_empty(llm)
    assert told(llm.generate(PROMPTS, EIGHT)) == right


@pytest.mark.skipif(not hasattr(signal, "SIGALRM"), reason="no such signal on this system")
def test_an_interrupt_that_counts_as_a_failure_is_caught(make_llm: MakeLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ThreadRun, "wait", lambda self: None)
    monkeypatch.setattr(ThreadRun, "result", lambda self, real=ThreadRun.result: (self._done.wait(), real(self))[1])
    with pytest.raises(pytest.fail.Exception, match="DID NOT RAISE"):
        interrupted_while_the_model_runs(make_llm(overlap_depth=2))


def test_aborts_between_steps(make_llm: MakeLLM, rng: random.Random) -> None:
    """After an abort of the last one nothing is under way any more; otherwise the others go on to their own answers."""
    llm = make_llm(overlap_depth=2, num_blocks=24, max_num_seqs=4)
    right = {
        str(list(output.prompt_token_ids or [])): list(output.outputs[0].token_ids)
        for output in make_llm().generate(PROMPTS, EIGHT)
    }
    for _ in range(12):
        ids = [llm.add_request(prompt, EIGHT) for prompt in rng.sample(PROMPTS * 2, 5)]
        doomed = rng.sample(ids, rng.choice([2, 5]))
        ended: list[RequestOutput] = []
        steps = 0
        while llm.has_unfinished_requests():
            ended += llm.step()
            if doomed and steps >= rng.randrange(6):
                llm.abort(doomed.pop())
            llm.scheduler.audit()
            steps += 1
        assert sorted(output.request_id for output in ended) == sorted(ids)
        for output in ended:
            if output.outputs[0].finish_reason == "length":
                assert list(output.outputs[0].token_ids) == right[str(list(output.prompt_token_ids or []))]
        check_empty(llm)


def test_clients_that_come_and_go(make_async: MakeAsync, rng: random.Random, make_llm: MakeLLM) -> None:
    """Beside those that leave, those that stay get their own answers; nothing is left over."""
    engine = make_async(overlap_depth=2, num_blocks=48, max_num_batched_tokens=32)
    right = [list(output.outputs[0].token_ids) for output in make_llm().generate(PROMPTS, EIGHT)]

    async def stays(place: int) -> None:
        outputs = await read(engine.generate(PROMPTS[place], EIGHT))
        assert list(outputs[-1].outputs[0].token_ids) == right[place]

    async def leaves(place: int, after: int) -> None:
        params = greedy(RequestOutputKind.DELTA, max_tokens=40)
        async with aclosing(engine.generate(PROMPTS[place], params)) as stream:
            async for _ in stream:
                after -= 1
                if after <= 0:
                    return

    async def main() -> None:
        clients = [stays(place % 4) for place in range(20)]
        clients += [leaves(rng.randrange(4), rng.randrange(1, 9)) for _ in range(20)]
        rng.shuffle(clients)
        await asyncio.gather(*clients)

    asyncio.run(main())
    settle(engine)


def test_depth_one_has_no_thread_for_the_model(llm: LLM) -> None:
    assert not hasattr(loop_of(llm)._runs, "_thread")
    llm.generate(PROMPTS[0], EIGHT)
    assert loop_of(llm)._under_way is None
