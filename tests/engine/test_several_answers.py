"""Promise: a request for several answers gives each the text that one of its own with the next seed would have, computes the
prompt once, and is over once: whatever ends it ends all of them, and whatever ends one answer leaves the others."""

import asyncio
import time
from contextlib import aclosing
from typing import Any

import pytest

from blocktable import LLM, InvalidInputError, RequestOutput, RequestOutputKind, SamplingParams
from blocktable.engine import step_loop
from blocktable.engine.family import Family

from .conftest import MakeAsync, MakeLLM, judge
from .faults import changing, faulty_model, interrupted_after, loop_of, raising
from .test_overlap import ASKED, PROMPTS, WAYS
from .ways import check_empty

N = 3
DRAWN = [name for name, params in ASKED.items() if params.temperature > 0]
Right = dict[str, list[list[tuple[Any, ...]]]]
"""By what is asked: for each prompt, what N requests of their own say."""


def params_of(name: str, **changes: Any) -> SamplingParams:
    known = {field: getattr(ASKED[name], field) for field in SamplingParams.__dataclass_fields__}
    return SamplingParams(**known | changes)


def told(output: RequestOutput) -> list[tuple[Any, ...]]:
    return [(one.index, one.text, list(one.token_ids), one.finish_reason, one.stop_reason) for one in output.outputs]


def alone(llm: LLM, prompt: Any, name: str) -> list[tuple[Any, ...]]:
    """What N requests of their own say."""
    seed = ASKED[name].seed or 0
    answers = [llm.generate(prompt, params_of(name, seed=seed + child))[0] for child in range(N)]
    return [(child, *told(answer)[0][1:]) for child, answer in enumerate(answers)]


@pytest.fixture(scope="module")
def right(tiny_model: Any, tiny_tokenizer: Any) -> Right:
    with judge(tiny_model, tiny_tokenizer) as llm:
        return {name: [alone(llm, prompt, name) for prompt in PROMPTS] for name in DRAWN}


def check_answers(make_llm: MakeLLM, right: Right, way: str, depth: int) -> None:
    several = make_llm(overlap_depth=depth, **WAYS[way])
    for name in DRAWN:
        outputs = several.generate(PROMPTS, params_of(name, n=N))
        assert [told(output) for output in outputs] == right[name], name
        assert all(output.finished for output in outputs)
        counts = [sum(len(one.token_ids) for one in output.outputs) for output in outputs]
        assert [output.metrics.num_generation_tokens for output in outputs if output.metrics] == counts
        check_over(several)


def check_over(llm: Any) -> None:
    check_empty(llm)
    assert loop_of(llm)._roster._families == {}
    assert loop_of(llm)._roster.is_empty


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("way", [way for way in WAYS if WAYS[way].get("max_num_seqs") != 1])
def test_each_answer_is_that_of_its_own_seed(way: str, depth: int, make_llm: MakeLLM, right: Right) -> None:
    check_answers(make_llm, right, way, depth)


@pytest.mark.parametrize("planted", ["first tokens of one seed", "over with the first", "places mixed up"])
def test_a_planted_fault_is_caught(planted: str, make_llm: MakeLLM, right: Right, monkeypatch: pytest.MonkeyPatch) -> None:
    end = Family.end

    def too_early(family: Family, output: RequestOutput, *, is_streamed: bool) -> RequestOutput | None:
        end(family, output, is_streamed=is_streamed)
        output.finished = len(family._ended) == 1
        return output if output.finished else None

    def mixed_up(family: Family, output: RequestOutput, *, is_streamed: bool) -> RequestOutput | None:
        found = end(family, output, is_streamed=is_streamed)
        if found is not None and len(found.outputs) > 1:
            found.outputs.reverse()
        return found

    if planted == "first tokens of one seed":
        sample = step_loop.Sampler.sample
        monkeypatch.setattr(
            step_loop.Sampler, "sample", lambda self, logits, rows, at, children: sample(self, logits, rows, at)
        )
    else:
        monkeypatch.setattr(Family, "end", too_early if planted == "over with the first" else mixed_up)
    with pytest.raises((AssertionError, KeyError, ValueError)):
        check_answers(make_llm, right, "plain", 1)


def test_the_prompt_is_computed_once(make_llm: MakeLLM) -> None:
    llm = make_llm(enable_prefix_caching=False)
    [output] = llm.generate({"prompt_token_ids": list(range(30))}, params_of("drawn", n=N, max_tokens=2))
    assert [len(one.token_ids) for one in output.outputs] == [2] * N
    assert llm.scheduler.stats()["scheduled_tokens"] == 30 + N
    assert output.num_cached_tokens == 0


@pytest.mark.parametrize("depth", [1, 2])
def test_a_stream_names_its_answers_and_is_finished_once(depth: int, make_llm: MakeLLM) -> None:
    llm = make_llm(overlap_depth=depth)
    whole = [told(output) for output in llm.generate(PROMPTS, params_of("stop strings", n=N))]
    texts: dict[tuple[int, int], str] = {}
    finished = []
    with llm.stream(PROMPTS, params_of("stop strings", n=N)) as stream:
        for place, output in stream:
            [one] = output.outputs
            texts[place, one.index] = texts.get((place, one.index), "") + one.text
            finished += [place] * output.finished
    assert sorted(finished) == list(range(len(PROMPTS)))
    assert texts == {(place, one[0]): one[1] for place, answers in enumerate(whole) for one in answers}
    check_over(llm)


@pytest.mark.parametrize("kind", RequestOutputKind)
def test_every_kind_of_output_holds_what_it_says(kind: RequestOutputKind, make_async: MakeAsync, make_llm: MakeLLM) -> None:
    right = told(make_llm().generate(PROMPTS[1], params_of("drawn", n=N))[0])
    engine = make_async()

    async def main() -> None:
        found: dict[int, tuple[str, list[int]]] = {}
        async for output in engine.generate(PROMPTS[1], params_of("drawn", n=N, output_kind=kind)):
            for one in output.outputs:
                before = found.get(one.index, ("", [])) if kind is RequestOutputKind.DELTA else ("", [])
                found[one.index] = (before[0] + one.text, before[1] + list(one.token_ids))
            if kind is RequestOutputKind.FINAL_ONLY:
                assert [one.index for one in output.outputs] == list(range(N))
                assert output.finished
        assert [found[child] for child in range(N)] == [(text, ids) for _, text, ids, _, _ in right]

    asyncio.run(main())


@pytest.mark.parametrize("kind", RequestOutputKind)
def test_who_comes_late_finds_each_answer_in_order(kind: RequestOutputKind, make_async: MakeAsync, make_llm: MakeLLM) -> None:
    """The first tokens of all but the first answer come another way than those behind them."""
    right = told(make_llm().generate(PROMPTS[1], params_of("drawn", n=N))[0])
    engine = make_async()

    async def main() -> RequestOutput:
        async with aclosing(engine.generate(PROMPTS[1], params_of("drawn", n=N, output_kind=kind))) as outputs:
            first = asyncio.ensure_future(anext(outputs))
            await asyncio.sleep(0)  # now it is queued
            while engine.step_thread.live_tickets:
                time.sleep(0.001)
            return await first

    assert told(asyncio.run(main())) == right


@pytest.mark.parametrize("when", ["waiting", "prefill", "parted"])
def test_an_abort_ends_all_of_them(when: str, make_llm: MakeLLM) -> None:
    llm = make_llm(max_num_batched_tokens=16)
    params = params_of("drawn", n=N, max_tokens=20)
    number = llm.add_request({"prompt_token_ids": list(range(40))}, params)
    for _ in range({"waiting": 0, "prefill": 1, "parted": 5}[when]):
        assert llm.step() == []
    assert llm.abort(number)
    assert not llm.abort(number)
    [output] = llm.step() or llm.step()
    assert [(one.index, one.finish_reason) for one in output.outputs] == [(child, "abort") for child in range(N)]
    assert all((len(one.token_ids) > 0) is (when == "parted") for one in output.outputs)
    while llm.has_unfinished_requests():
        llm.step()
    llm.step()
    check_over(llm)


def test_an_answer_that_ends_early_can_be_followed_by_an_abort_of_the_rest(make_llm: MakeLLM) -> None:
    """The first answer, whose number is the request's, is gone by then."""
    llm = make_llm()
    alone_ids = [answer[2] for answer in alone(llm, PROMPTS[0], "drawn")]
    ends = [ids[1] for ids in alone_ids]
    assert ends[0] not in alone_ids[1] + alone_ids[2], "only the first one says this"
    number = llm.add_request(PROMPTS[0], params_of("drawn", n=N, stop_token_ids=[ends[0]]))
    for _ in range(4):
        assert llm.step() == []
    assert llm.abort(number)
    [output] = llm.step()
    assert [one.finish_reason for one in output.outputs] == ["stop", "abort", "abort"]
    llm.step()
    check_over(llm)


def test_who_leaves_ends_all_of_them(make_async: MakeAsync) -> None:
    engine = make_async()

    async def main() -> None:
        async with aclosing(engine.generate(PROMPTS[1], params_of("drawn", n=N, max_tokens=25))) as outputs:
            await anext(outputs)
        while engine.scheduler.num_running + engine.scheduler.num_waiting:
            await asyncio.sleep(0.001)

    asyncio.run(main())
    assert engine.shutdown(timeout_s=60)
    assert loop_of(engine)._roster._families == {}


@pytest.mark.parametrize("wish", [{"queue_deadline_s": 1e-6}, {"deadline_s": 1e-6}])
def test_a_deadline_before_the_first_token_ends_all_of_them(wish: dict[str, float], make_llm: MakeLLM) -> None:
    llm = make_llm()
    [output] = llm.generate(PROMPTS[0], params_of("drawn", n=N), **wish)
    reason = "refused" if "queue_deadline_s" in wish else "abort"
    assert [one.finish_reason for one in output.outputs] == [reason] * N
    check_over(llm)


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("at", [0, 1, 4])
def test_a_step_that_fails_for_good_ends_all_of_them(at: int, depth: int, make_llm: MakeLLM) -> None:
    llm = make_llm(max_step_retries=0, overlap_depth=depth)
    with faulty_model(llm, raising(RuntimeError("planted")), at={at}):
        [output] = llm.generate(PROMPTS[0], params_of("drawn", n=N))
    assert [one.finish_reason for one in output.outputs] == ["error"] * N
    check_over(llm)
    assert [one.finish_reason for one in llm.generate(PROMPTS[0], params_of("drawn", n=N))[0].outputs] == ["length"] * N


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("at", [0, 3])
def test_logits_without_a_choice_for_one_end_all_of_its_request_and_no_other(at: int, depth: int, make_llm: MakeLLM) -> None:
    llm = make_llm(overlap_depth=depth)
    right = told(llm.generate(PROMPTS[1], params_of("drawn", n=N))[0])

    def spoil(plan: Any, logits: Any) -> None:
        logits[-1] = float("nan")  # of the newest: the last answer of the second request

    with faulty_model(llm, changing(spoil), at={at}):
        good, bad = llm.generate([PROMPTS[1], PROMPTS[0]], params_of("drawn", n=N))
    assert told(good) == right
    assert [one.finish_reason for one in bad.outputs] == ["error"] * N
    check_over(llm)


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("after", ["plan", "commit"])
def test_an_interrupt_leaves_nothing(after: str, depth: int, make_llm: MakeLLM) -> None:
    for calls in (1, 2, 3):
        llm = make_llm(overlap_depth=depth)
        with interrupted_after(llm, after, calls), pytest.raises(KeyboardInterrupt):
            llm.generate(PROMPTS, params_of("drawn", n=N))
        check_over(llm)


def test_more_answers_than_run_at_once_are_refused(make_llm: MakeLLM) -> None:
    llm = make_llm(max_num_seqs=2)
    with pytest.raises(InvalidInputError, match="n=3") as refusal:
        llm.generate(PROMPTS, params_of("drawn", n=N))
    assert refusal.value.field == "n"
    check_over(llm)
