"""Promise: a step whose model fails is undone and runs again to the same text; a model that goes on failing ends the requests
of its step, and no others; logits that hold no choice end their own request. The engine goes on in every case."""

import logging
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from blocktable import LLM, RequestOutput, SamplingParams

from .conftest import MakeLLM
from .faults import Fault, changing, faulty_model, loop_of, raising
from .ways import check_empty

PROMPTS = [{"prompt_token_ids": list(range(first, first + length))} for first, length in ((1, 5), (40, 20), (40, 30), (90, 9))]
EIGHT = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
DRAWN = SamplingParams(temperature=1.0, top_p=0.95, seed=11, max_tokens=8, ignore_eos=True)

pytestmark = pytest.mark.filterwarnings("error")


def texts(outputs: list[RequestOutput]) -> list[list[int]]:
    return [list(output.outputs[0].token_ids) for output in outputs]


def reasons(outputs: list[RequestOutput]) -> list[str | None]:
    return [output.outputs[0].finish_reason for output in outputs]


@pytest.mark.parametrize("is_late", [False, True], ids=["before writing", "after writing"])
@pytest.mark.parametrize("params", [EIGHT, DRAWN], ids=["greedy", "drawn"])
@pytest.mark.parametrize("failing", [{0}, {1}, {3}, {0, 1}, {2, 3, 6, 7}, set(range(0, 60, 2))], ids=str)
def test_a_failed_step_runs_again_to_the_same_text(
    failing: set[int], params: SamplingParams, is_late: bool, make_llm: MakeLLM
) -> None:
    options = {"max_num_batched_tokens": 16, "num_blocks": 12}  # chunks, and preemptions
    expected = texts(make_llm(**options).generate(PROMPTS, params))
    llm = make_llm(**options)
    with faulty_model(llm, raising(RuntimeError("out of memory"), is_late=is_late), failing) as runner:
        outputs = llm.generate(PROMPTS, params)
    assert texts(outputs) == expected
    assert reasons(outputs) == ["length"] * len(PROMPTS)
    assert llm.kv_report().failed_steps == len([call for call in failing if call < runner.calls])
    check_empty(llm)


def test_a_failed_step_that_is_not_undone_is_caught(make_llm: MakeLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """The check above can fail: here the failed step is committed, with a token of nobody's choice."""
    expected = texts(make_llm().generate(PROMPTS, EIGHT))
    llm = make_llm()
    loop = loop_of(llm)

    def commit_anyway(plan: Any, error: Exception) -> None:
        count = len(plan.sample_rows)
        logits = torch.zeros(count, 272)
        monkeypatch.undo()
        rows = plan.seq_slots[:count].copy()
        sampled = loop._sampler.sample(logits, rows, loop._roster.rows.outputs.positions(rows))
        ids, starts = sampled.accepted()
        step = SimpleNamespace(rows=rows, children=None)
        loop._hand_out.take(step, sampled, loop.scheduler.commit(plan.step, ids, starts, 0), 0)

    monkeypatch.setattr(loop, "_survive", commit_anyway)
    with faulty_model(llm, raising(RuntimeError("out of memory")), {1}):
        assert texts(llm.generate(PROMPTS, EIGHT)) != expected


def test_a_model_that_goes_on_failing_ends_the_requests_of_its_step_and_no_others(
    make_llm: MakeLLM, caplog: pytest.LogCaptureFixture
) -> None:
    expected = texts(make_llm().generate(PROMPTS, EIGHT))
    llm = make_llm(max_num_seqs=2, max_step_retries=2, enable_prefix_caching=False)
    with caplog.at_level(logging.CRITICAL), faulty_model(llm, raising(ValueError("no kernel")), {0, 1, 2}):
        outputs = llm.generate(PROMPTS, EIGHT)
    assert reasons(outputs) == ["error", "error", "length", "length"]
    assert texts(outputs) == [[], [], *expected[2:]]
    assert llm.scheduler.stats()["failed_steps"] == 3
    check_empty(llm)
    assert texts(llm.generate(PROMPTS, EIGHT)) == expected


def test_without_retries_the_first_failure_ends_its_requests(make_llm: MakeLLM) -> None:
    llm = make_llm(max_step_retries=0)
    with faulty_model(llm, raising(ValueError("no kernel")), {2}):
        outputs = llm.generate(PROMPTS, EIGHT)
    assert reasons(outputs) == ["error"] * 4
    assert all(len(tokens) == 2 for tokens in texts(outputs)), "what had been confirmed is given back"
    check_empty(llm)


def test_a_failure_that_heals_does_not_count_against_later_ones(make_llm: MakeLLM) -> None:
    """Retries are counted in a row: every second call fails, many more times than there are retries."""
    llm = make_llm(max_step_retries=1)
    with faulty_model(llm, raising(RuntimeError("flaky")), set(range(0, 100, 2))):
        assert reasons(llm.generate(PROMPTS, EIGHT)) == ["length"] * 4
    assert llm.scheduler.stats()["failed_steps"] >= 8


BAD_LOGITS = {"nan": float("nan"), "inf": float("inf"), "everything masked": float("-inf")}


@pytest.mark.parametrize("name", BAD_LOGITS)
@pytest.mark.parametrize("at", [0, 1, 5])
def test_logits_without_a_choice_end_their_own_request_only(name: str, at: int, make_llm: MakeLLM) -> None:
    expected = texts(make_llm().generate(PROMPTS, EIGHT))
    llm = make_llm()
    bad = BAD_LOGITS[name]

    def poison(plan: Any, logits: torch.Tensor) -> None:
        # The second request's row: ids count from 1.
        logits[[entry for entry, request in enumerate(plan.sample_requests.tolist()) if request == 2]] = bad

    with faulty_model(llm, changing(poison), {at}):
        outputs = llm.generate(PROMPTS, EIGHT)
    assert reasons(outputs) == ["length", "error", "length", "length"]
    assert texts(outputs) == [expected[0], expected[1][:at], *expected[2:]]
    check_empty(llm)
    assert texts(llm.generate(PROMPTS, EIGHT)) == expected


def test_one_nan_among_good_logits_counts_too(make_llm: MakeLLM) -> None:
    llm = make_llm()

    def poison(plan: Any, logits: torch.Tensor) -> None:
        logits[0, 5] = float("nan")

    with faulty_model(llm, changing(poison), {3}):
        assert sorted(map(str, reasons(llm.generate(PROMPTS, DRAWN)))) == ["error", "length", "length", "length"]
    check_empty(llm)


def test_a_failure_reaches_streams_as_their_last_output(make_llm: MakeLLM) -> None:
    llm: LLM = make_llm(max_step_retries=0)
    with faulty_model(llm, raising(ValueError("no kernel")), {3}):
        last = {place: output for place, output in llm.stream(PROMPTS, EIGHT) if output.finished}
    assert [last[place].outputs[0].finish_reason for place in range(4)] == ["error"] * 4
    check_empty(llm)


SHARED = list(range(100, 116))  # two blocks of eight
SHARING = [{"prompt_token_ids": SHARED}, {"prompt_token_ids": [*SHARED, 1, 2, 3]}, {"prompt_token_ids": [7] * 5}]


def lose_the_writer(llm: LLM, how: str) -> Fault:
    """The first request, which writes what the second one shares in the same step, is lost in flight."""

    def change(plan: Any, logits: torch.Tensor) -> None:
        assert plan.sample_requests.tolist() == [1, 2, 3]
        assert plan.seq_lens.tolist() == [16, 19, 5]
        assert plan.query_starts.tolist() == [0, 16, 19, 24], "the second one computes what is its own only"
        if how == "abort":
            llm.abort("1")
        else:
            logits[0] = float("nan")

    return changing(change)


@pytest.mark.parametrize("how", ["abort", "nan"])
def test_who_shared_a_block_that_is_withdrawn_is_sampled_again(how: str, make_llm: MakeLLM) -> None:
    expected = [texts(make_llm(enable_prefix_caching=False).generate(prompt, EIGHT))[0] for prompt in SHARING]
    llm = make_llm()
    with faulty_model(llm, lose_the_writer(llm, how), {0}):
        outputs = llm.generate(SHARING, EIGHT)
    assert reasons(outputs) == ["abort" if how == "abort" else "error", "length", "length"]
    assert texts(outputs)[1:] == expected[1:]
    assert texts(outputs)[0] == []
    check_empty(llm)


def test_a_dropped_token_that_is_kept_in_the_books_is_caught(make_llm: MakeLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """The check above can fail: here every token that was sampled is noted."""
    llm = make_llm()
    loop = loop_of(llm)
    real = loop._hand_out.take

    def take_all(step: Any, sampled: Any, done: Any, now_ns: int) -> None:
        loop._roster.rows.take(step.rows[done.dropped], sampled.ids[done.dropped], now_ns)
        real(step, sampled, done, now_ns)

    monkeypatch.setattr(loop._hand_out, "take", take_all)
    with faulty_model(llm, lose_the_writer(llm, "abort"), {0}):
        outputs = llm.generate(SHARING, EIGHT)
    assert len(texts(outputs)[1]) != 8
