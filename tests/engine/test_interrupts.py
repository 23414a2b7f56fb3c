"""Promise: an interrupt, wherever it falls, ends every request, frees every block, and goes on to the caller; the engine then
answers as before. The library installs no signal handler."""

import random
import signal
from typing import Any

import pytest

from blocktable import LLM, RequestOutput, SamplingParams
from blocktable.engine.step_loop import StepLoop

from .conftest import MakeLLM
from .faults import faulty_model, interrupted_after, loop_of, raising
from .ways import check_empty

PROMPTS = [{"prompt_token_ids": list(range(first, first + length))} for first, length in ((1, 5), (40, 20), (40, 30), (90, 9))]
EIGHT = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
STOPS = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, stop=["never in this text"])


def texts(outputs: list[RequestOutput]) -> list[list[int]]:
    return [list(output.outputs[0].token_ids) for output in outputs]


@pytest.fixture
def expected(make_llm: MakeLLM) -> list[list[int]]:
    return texts(make_llm().generate(PROMPTS, EIGHT))


def works_as_before(llm: LLM, expected: list[list[int]]) -> None:
    check_empty(llm)
    assert texts(llm.generate(PROMPTS, EIGHT)) == expected
    check_empty(llm)


@pytest.mark.parametrize("at", [0, 1, 4])
def test_an_interrupt_in_the_model(at: int, llm: LLM, expected: list[list[int]]) -> None:
    with faulty_model(llm, raising(KeyboardInterrupt()), {at}), pytest.raises(KeyboardInterrupt):
        llm.generate(PROMPTS, EIGHT)
    works_as_before(llm, expected)


@pytest.mark.parametrize("name", ["submit", "plan", "commit", "num_cached_tokens"])
@pytest.mark.parametrize("at", [0, 1, 3])
def test_an_interrupt_right_after_the_scheduler_has_acted(name: str, at: int, llm: LLM, expected: list[list[int]]) -> None:
    """The caller never sees what was returned: a request, a plan or a commit that nobody knows of."""
    with interrupted_after(llm, name, at), pytest.raises(KeyboardInterrupt):
        llm.generate(PROMPTS, EIGHT)
    works_as_before(llm, expected)


@pytest.mark.parametrize("name", ["abort", "fail", "plan"])
def test_a_second_interrupt_while_the_first_is_cleaned_up(name: str, llm: LLM, expected: list[list[int]]) -> None:
    def twice() -> None:
        with faulty_model(llm, raising(KeyboardInterrupt()), {2}), interrupted_after(llm, name, 3 if name == "plan" else 0):
            llm.generate(PROMPTS, EIGHT)

    with pytest.raises(KeyboardInterrupt):
        twice()
    # Nothing is asked of the engine in between: the next call puts things right by itself.
    assert texts(llm.generate(PROMPTS, EIGHT)) == expected
    check_empty(llm)


@pytest.mark.parametrize("where", ["take_token", "end", "set_row", "open"])
def test_an_interrupt_in_the_books(where: str, llm: LLM, expected: list[list[int]], monkeypatch: pytest.MonkeyPatch) -> None:
    from blocktable.engine.live_request import LiveRequest
    from blocktable.engine.output_rows import OutputRows
    from blocktable.sampling.sampler import Sampler

    owner: Any = {"take_token": LiveRequest, "end": LiveRequest, "set_row": Sampler, "open": OutputRows}[where]
    real, calls = getattr(owner, where), iter([False, True])

    def interrupted(*args: Any, **options: Any) -> Any:
        if next(calls, False):
            raise KeyboardInterrupt
        return real(*args, **options)

    monkeypatch.setattr(owner, where, interrupted)
    with pytest.raises(KeyboardInterrupt):
        llm.generate(PROMPTS, STOPS)
    monkeypatch.undo()
    works_as_before(llm, expected)


def test_an_interrupt_ends_the_other_requests_of_the_engine_too(llm: LLM, expected: list[list[int]]) -> None:
    """Those of `add_request` and of streams get their last output, so that nobody waits for ever."""
    added = llm.add_request(PROMPTS[0], SamplingParams(max_tokens=100, ignore_eos=True))
    with llm.stream(PROMPTS[1], EIGHT) as stream:
        next(stream)
        with faulty_model(llm, raising(KeyboardInterrupt())), pytest.raises(KeyboardInterrupt):
            llm.generate(PROMPTS, EIGHT)
        rest = [output for _, output in stream]
    assert [output.outputs[0].finish_reason for output in rest if output.finished] == ["abort"]
    assert [(output.request_id, output.outputs[0].finish_reason) for output in llm.step()] == [(added, "abort")]
    assert not llm.has_unfinished_requests()
    works_as_before(llm, expected)


def test_an_interrupt_that_frees_nothing_is_caught(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """The check can fail: an engine that cleans up nothing is not empty."""
    monkeypatch.setattr(StepLoop, "abandon", lambda self: None)
    monkeypatch.setattr(StepLoop, "abort", lambda self, number: False)
    with faulty_model(llm, raising(KeyboardInterrupt()), {1}), pytest.raises(KeyboardInterrupt):
        llm.generate(PROMPTS, EIGHT)
    with pytest.raises(AssertionError):
        check_empty(llm)
    monkeypatch.undo()
    loop_of(llm).abandon()


@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="no interval timer on this system")
# Python passes over an interrupt that falls into the finalizer of a dropped stream: the engine has to work after that one, too.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_signals_at_any_moment(llm: LLM, expected: list[list[int]], rng: random.Random) -> None:
    """Real signals, at times that no test would choose: after each one the engine is empty and answers as before."""
    hits, rounds, within_s = 0, 0, 0.04
    is_armed = False

    def handle(number: int, frame: Any) -> None:
        if is_armed:
            raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, handle)
    try:
        while rounds < 60 or (hits < 20 and rounds < 600):
            rounds += 1
            try:
                is_armed = True
                signal.setitimer(signal.ITIMER_REAL, rng.uniform(0.0001, within_s))
                if rounds % 3:
                    llm.generate(PROMPTS, STOPS)
                else:
                    list(llm.stream(PROMPTS, EIGHT))
                is_armed = False
                within_s = max(within_s * 0.9, 0.0005)  # came too late: the machine is fast
            except KeyboardInterrupt:
                is_armed = False
                hits += 1
                within_s = min(within_s * 1.1, 1.0)
            signal.setitimer(signal.ITIMER_REAL, 0)
            works_as_before(llm, expected)
    finally:
        signal.signal(signal.SIGALRM, before)
    print(f"{hits} of {rounds} rounds were interrupted")
    assert hits >= 20


def test_the_library_installs_no_signal_handler(make_llm: MakeLLM) -> None:
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    llm = make_llm()
    llm.generate(PROMPTS, EIGHT)
    assert {number: signal.getsignal(number) for number in before} == before
