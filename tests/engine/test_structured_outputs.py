"""Promise: every answer that ends by itself has the shape that was asked for, whoever else is in its steps, however it was
scheduled, and the same one as alone; what cannot go on ends its own request."""

import asyncio
import json
import re
from typing import Any

import jsonschema_rs
import numpy as np
import pytest

from blocktable import (
    InvalidGrammarError,
    MissingExtraError,
    RequestOutput,
    RequestOutputKind,
    SamplingParams,
    StructuredOutputsParams,
)
from blocktable.engine.live_request import LiveRequest
from blocktable.engine.running_rows import RunningRows
from blocktable.sampling import grammar, grammar_trial
from blocktable.sampling.guide import Guide
from blocktable.sampling.sampler import Sampler

from .conftest import MakeAsync, MakeLLM, judge
from .faults import faulty_model, loop_of, raising
from .test_overlap import PROMPTS, WAYS
from .tiny_llama import END_ID
from .ways import check_empty

POINT = {
    "type": "object",
    "properties": {"x": {"type": "integer", "minimum": 0, "maximum": 999}, "is": {"enum": ["near", "far"]}},
    "required": ["x", "is"],
    "additionalProperties": False,
}
DATE = r"(19|20)[0-9]{2}-(0[1-9]|1[0-2])"

SHAPES: list[StructuredOutputsParams | None] = [
    StructuredOutputsParams(json=POINT, disable_any_whitespace=True),
    None,
    StructuredOutputsParams(regex=DATE),
    StructuredOutputsParams(choice=["yes", "yes and no", "no"]),
    StructuredOutputsParams(grammar='start: "<" start ">" | /[xyz]/'),
]


TEMPERATURES = (0.0, 1.5)
Alone = dict[tuple[float, int], list[list[tuple[Any, ...]]]]
"""By temperature and number of answers: what each prompt is answered by itself."""

WAYS_OF_SEVERAL = [way for way in WAYS if WAYS[way].get("max_num_seqs") != 1]


def has_shape(shape: StructuredOutputsParams, text: str) -> bool:
    if shape.json is not None:
        return bool(jsonschema_rs.is_valid(POINT, json.loads(text)))
    if shape.regex is not None:
        return re.fullmatch(shape.regex, text) is not None
    if shape.choice:
        return text in shape.choice
    return re.fullmatch("<*[xyz]>*", text) is not None and text.count("<") == text.count(">")


def asked(temperature: float, n: int, **changes: Any) -> list[SamplingParams]:
    """One for each prompt, shapes in turn."""
    return [
        SamplingParams(
            **{"temperature": temperature, "seed": 11 + place, "n": n, "max_tokens": 40, "ignore_eos": place % 2 == 1}
            | {"structured_outputs": SHAPES[place % len(SHAPES)]}
            | changes
        )
        for place in range(len(PROMPTS))
    ]


def told(output: RequestOutput) -> list[tuple[Any, ...]]:
    return [(one.index, one.text, list(one.token_ids), one.finish_reason, one.stop_reason) for one in output.outputs]


@pytest.fixture(scope="module")
def alone(tiny_model: Any, tiny_tokenizer: Any) -> Alone:
    with judge(tiny_model, tiny_tokenizer) as llm:
        return {
            (temperature, n): [told(llm.generate(prompt, one)[0]) for prompt, one in zip(PROMPTS, asked(temperature, n))]
            for temperature in TEMPERATURES
            for n in (1, 3)
        }


def check_shapes(make_llm: MakeLLM, alone: Alone, way: str, depth: int, n: int) -> None:
    llm = make_llm(overlap_depth=depth, **WAYS[way])
    num_whole = 0
    for temperature in TEMPERATURES:
        params = asked(temperature, n)
        outputs = llm.generate(PROMPTS, params)
        for one, output, right in zip(params, outputs, alone[temperature, n]):
            assert told(output) == right
            for answer in output.outputs:
                if one.structured_outputs is not None and answer.finish_reason == "stop":
                    num_whole += 1
                    assert has_shape(one.structured_outputs, answer.text), answer.text
                    assert answer.stop_reason is None
        check_empty(llm)
        assert loop_of(llm)._sampler._guides == {}
    assert num_whole > len(PROMPTS) // 2


def check_all_ways(make_llm: MakeLLM, alone: Alone) -> None:
    for way in WAYS_OF_SEVERAL:
        check_shapes(make_llm, alone, way, 1, 3)


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("way", WAYS_OF_SEVERAL)
def test_every_answer_has_its_shape_and_is_the_one_that_it_is_alone(
    way: str, depth: int, n: int, make_llm: MakeLLM, alone: Alone
) -> None:
    check_shapes(make_llm, alone, way, depth, n)


@pytest.mark.parametrize("planted", ["no mask", "the guide of another row", "begins anew in each row", "is never told"])
def test_a_planted_fault_is_caught(planted: str, make_llm: MakeLLM, alone: Alone, monkeypatch: pytest.MonkeyPatch) -> None:
    if planted == "no mask":
        monkeypatch.setattr(Sampler, "_mask_grammars", lambda *_: None)
    elif planted == "the guide of another row":
        mask = Sampler._mask_grammars
        monkeypatch.setattr(Sampler, "_mask_grammars", lambda self, logits, rows: mask(self, logits, np.roll(rows, 1)))
    elif planted == "begins anew in each row":
        enter = RunningRows.enter

        def anew(rows: RunningRows, request: LiveRequest, row: int) -> None:
            if request.guide is not None and request.num_preemptions:
                shape = request.guide
                request.guide = Guide(shape._grammar, shape._matcher.deep_copy(), shape.allowed, shape._silent, shape._end_ids)
                request.guide._matcher.reset()
            enter(rows, request, row)

        monkeypatch.setattr(RunningRows, "enter", anew)
    else:
        monkeypatch.setattr(LiveRequest, "is_heard", property(lambda self: self.text is not None))
    with pytest.raises((AssertionError, ValueError)):
        check_all_ways(make_llm, alone)


def test_preemption_is_met_here(make_llm: MakeLLM) -> None:
    """The ways above hold one in which guided requests lose their rows."""
    lost = []
    for way in WAYS_OF_SEVERAL:
        llm = make_llm(**WAYS[way])
        llm.generate(PROMPTS, asked(1.5, 3))
        lost.append(llm.kv_report().preemptions)
    assert max(lost) > 0


def test_a_stream_ends_with_its_shape(make_llm: MakeLLM) -> None:
    llm = make_llm()
    params = asked(1.5, 1)
    whole = [told(output)[0] for output in llm.generate(PROMPTS, params)]
    texts, ends = [""] * len(PROMPTS), [None] * len(PROMPTS)
    with llm.stream(PROMPTS, params) as stream:
        for place, output in stream:
            texts[place] += output.outputs[0].text
            ends[place] = output.outputs[0].finish_reason
    assert [(text, end) for text, end in zip(texts, ends)] == [(one[1], one[3]) for one in whole]
    check_empty(llm)


def test_a_failed_step_and_its_repetition_leave_every_guide_where_it_was(make_llm: MakeLLM) -> None:
    llm = make_llm(max_step_retries=3)
    params = asked(1.5, 1)
    right = [told(output) for output in llm.generate(PROMPTS, params)]
    with faulty_model(llm, raising(RuntimeError("planted")), {3, 6}):
        assert [told(output) for output in llm.generate(PROMPTS, params)] == right
    check_empty(llm)


def test_ends_wait_for_min_tokens_and_for_the_grammar(make_llm: MakeLLM) -> None:
    llm = make_llm()
    shape = StructuredOutputsParams(regex="a+")
    for seed in range(12):
        params = SamplingParams(temperature=1.5, seed=seed, max_tokens=30, min_tokens=5, structured_outputs=shape)
        [answer] = llm.generate("b", params)[0].outputs
        assert re.fullmatch("a{5,30}", answer.text)
        ends = [token for token in answer.token_ids if token == END_ID]
        assert ends == ([END_ID] if answer.finish_reason == "stop" else [])


def test_a_grammar_that_costs_too_much_on_the_way_ends_its_own_request(
    make_llm: MakeLLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(grammar_trial.LIMITS, "max_lexer_states", 100)
    llm = make_llm()
    costly = StructuredOutputsParams(regex="([ab]*a[ab]{20}){20}")
    params = [
        SamplingParams(temperature=1.5, seed=1, max_tokens=200, ignore_eos=True, structured_outputs=one)
        for one in (costly, None)
    ]
    first, second = llm.generate(["x", "y"], params)
    assert (first.outputs[0].finish_reason, first.outputs[0].stop_reason) == ("abort", "grammar")
    assert 0 < len(first.outputs[0].token_ids) < 200
    assert second.outputs[0].finish_reason == "length"
    check_empty(llm)


def test_a_wrong_grammar_is_refused_before_anything_is_queued(make_llm: MakeLLM) -> None:
    llm = make_llm()
    right, wrong = SamplingParams(), SamplingParams(structured_outputs={"regex": "(a"})
    with pytest.raises(InvalidGrammarError, match="unclosed group"):
        llm.generate(["a", "b"], [right, wrong])
    assert llm.scheduler.stats()["submitted"] == 0


def test_without_the_package_its_extra_is_named(make_llm: MakeLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*_: Any) -> Any:
        raise ImportError("no llguidance")

    monkeypatch.setattr(grammar, "make_tokenizer", missing)
    with pytest.raises(MissingExtraError, match=r"blocktable\[structured\]"):
        make_llm().generate("a", SamplingParams(structured_outputs={"regex": "a"}))


def test_without_a_tokenizer_it_is_refused(make_llm: MakeLLM) -> None:
    with pytest.raises(ValueError, match="no tokenizer"):
        make_llm(tokenizer=None).generate({"prompt_token_ids": [1]}, SamplingParams(structured_outputs={"regex": "a"}))


def test_an_event_loop_runs_on_while_a_grammar_is_tried(make_async: MakeAsync) -> None:
    engine = make_async()
    costly = SamplingParams(structured_outputs={"json": {"type": "integer", "multipleOf": 99999989}})

    async def main() -> None:
        turns = 0

        async def count() -> None:
            nonlocal turns
            while True:
                await asyncio.sleep(0.001)
                turns += 1

        counting = asyncio.ensure_future(count())
        with pytest.raises(InvalidGrammarError, match="takes more than"):
            async for _ in engine.generate("a", costly):
                pass
        assert turns > 50
        counting.cancel()
        params = SamplingParams(structured_outputs={"choice": ["b"]}, output_kind=RequestOutputKind.FINAL_ONLY)
        [output] = [output async for output in engine.generate("a", params)]
        assert output.outputs[0].text == "b"

    asyncio.run(main())
    check_empty(engine)
