"""Promise: the tokens of a prompt have the log probabilities of transformers' own full forward, however the prompt was cut into
chunks, preempted, overlapped or failed, and whoever runs beside it; whoever does not ask has none, and pays nothing."""

import asyncio
import copy
import pickle
from collections.abc import Callable
from contextlib import nullcontext
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch

from blocktable import LLM, RequestOutput, RequestOutputKind, SamplingParams
from blocktable.engine import hand_out, roster
from blocktable.engine.live_request import LiveRequest
from blocktable.engine.prompt_scores import PromptRows, PromptScores
from blocktable.errors import InvalidInputError
from blocktable.model import packed_forward
from blocktable.sampling.logprobs import LOWEST_LOGPROB
from tests.model.tiny import ARCHITECTURES

from .conftest import MakeAsync, MakeLLM
from .faults import faulty_model, loop_of
from .tiny_llama import VOCAB_SIZE, make_model
from .ways import check_empty

PROMPTS: list[list[int]] = [
    [5], [7, 3], list(range(1, 70)), list(range(40, 60)), [9, 8] * 30, list(range(1, 70)), list(range(40, 90)), [2] * 33
]  # fmt: skip
"""Of one token, of two, with beginnings that they share, and one twice."""

BEST = 3
ASKED = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, prompt_logprobs=BEST)
PLAIN = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
NEAR = 2e-4
"""Float32 sums in another order, at logits of some tens."""


def given(prompts: list[list[int]]) -> list[Any]:
    return [{"prompt_token_ids": prompt} for prompt in prompts]


MODELS = {"tiny": make_model} | ARCHITECTURES
"""Each makes the same weights at each call."""


@cache
def plain_model(name: str) -> Any:
    """One that no engine has."""
    return MODELS[name]()


@cache
@torch.inference_mode()
def full_forward(name: str, prompt: tuple[int, ...]) -> torch.Tensor:
    """[T, vocab] float64 of transformers' own pass over the whole prompt."""
    logits: torch.Tensor = plain_model(name)(torch.tensor([prompt])).logits[0].double()
    return logits.log_softmax(-1)


def check_prompt(output: RequestOutput, name: str = "tiny") -> None:
    prompt = list(output.prompt_token_ids or ())
    told = output.prompt_logprobs
    assert told is not None
    assert len(told) == len(prompt)
    assert told[0] is None
    for place, one in enumerate(told[1:]):
        right, token_id = full_forward(name, tuple(prompt))[place], prompt[place + 1]
        assert one is not None
        assert next(iter(one)) == token_id
        assert len(one) in (BEST, BEST + 1)
        for other, logprob in one.items():
            assert logprob.logprob == pytest.approx(float(right[other]), abs=NEAR)
        rank = one[token_id].rank
        assert int((right > right[token_id] + NEAR).sum()) < rank <= 1 + int((right > right[token_id] - NEAR).sum())
        best = sorted((other for other in one.values()), key=lambda other: other.rank)[:BEST]
        assert [other.rank for other in best] == list(range(1, BEST + 1))
        assert [other.logprob for other in best] == pytest.approx(right.topk(BEST).values.tolist(), abs=NEAR)


WAYS: dict[str, dict[str, Any]] = {
    "plain": {"max_num_batched_tokens": 256},
    "chunks": {"max_num_batched_tokens": 8},
    "a small pool": {
        "num_blocks": 13,
        "max_num_batched_tokens": 24,
        "max_num_seqs": 4,
        "watermark": 0,
        "estimate_growth": False,
    },
    "no cache": {"enable_prefix_caching": False},
}


def check_way(make_llm: MakeLLM, way: str, depth: int) -> LLM:
    """Some ask for their prompts, some do not, and all are warm the second time."""
    llm = make_llm(overlap_depth=depth, **WAYS[way])
    params = [PLAIN if place % 4 == 3 else ASKED for place in range(len(PROMPTS))]
    texts = [output.outputs[0].token_ids for output in make_llm().generate(given(PROMPTS), PLAIN)]
    for _ in range(2):
        outputs = llm.generate(given(PROMPTS), params)
        assert [output.outputs[0].token_ids for output in outputs] == texts
        for output, one in zip(outputs, params, strict=True):
            if one is PLAIN:
                assert output.prompt_logprobs is output.prompt_token_logprobs is None
            else:
                assert output.num_cached_tokens == 0
                check_prompt(output)
    assert way != "a small pool" or any(output.metrics.num_preemptions for output in outputs if output.metrics)
    check_empty(llm)
    return llm


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("way", WAYS)
def test_they_are_those_of_a_full_forward(way: str, depth: int, make_llm: MakeLLM) -> None:
    check_way(make_llm, way, depth)


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("length", [15, 16, 17, 32, 33])
def test_a_prompt_that_lies_in_the_cache_is_scored_as_a_whole(length: int, n: int, make_llm: MakeLLM) -> None:
    """None, some or all of its blocks are there, and stay there for who does not ask."""
    llm = make_llm(block_size=16, num_blocks=40)
    prompt = given([list(range(7, 7 + length))])
    params = [SamplingParams(n=n, seed=1, max_tokens=3, ignore_eos=True, prompt_logprobs=best) for best in (None, BEST)]
    cold, asked, warm, again = (llm.generate(prompt, params[which])[0] for which in (0, 1, 0, 1))
    for output in (asked, again):
        check_prompt(output)
        assert output.num_cached_tokens == 0
        assert [one.token_ids for one in output.outputs] == [one.token_ids for one in cold.outputs]
    assert warm.num_cached_tokens == length - 1
    assert [one.token_ids for one in warm.outputs] == [one.token_ids for one in cold.outputs]
    check_empty(llm)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_every_architectures_head_is_its_own(name: str, make_llm: MakeLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Caps, scales and shares of logits are the model's own, also where its head runs by itself."""
    monkeypatch.setattr(packed_forward, "PIECE_BYTES", 4 * 128 * 7)
    llm = make_llm(model=ARCHITECTURES[name](), tokenizer=None, max_num_batched_tokens=40)
    outputs = llm.generate(given([list(range(3, 90)), [5] * 20]), SamplingParams(max_tokens=1, prompt_logprobs=BEST))
    for output in outputs:
        check_prompt(output, name)


def scores_every_row(model: Any) -> None:
    """A model of before `logits_to_keep`."""
    score = type(model).forward

    class Older(type(model)):  # type: ignore[misc]
        def forward(self, input_ids: Any = None, position_ids: Any = None, use_cache: Any = None) -> Any:
            return score(self, input_ids=input_ids, position_ids=position_ids, use_cache=use_cache)

    model.__class__ = Older


def has_no_body(model: Any) -> None:
    """A model whose layers are not a module of their own."""
    model.base_model_prefix = "nothing"


@pytest.mark.parametrize("change", [scores_every_row, has_no_body])
def test_a_model_that_is_built_otherwise_is_scored_too(
    change: Callable[[Any], None], make_llm: MakeLLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packed_forward, "PIECE_BYTES", 4 * VOCAB_SIZE * 7)
    model = make_model()
    change(model)
    for output in make_llm(model=model, max_num_batched_tokens=40).generate(given(PROMPTS), ASKED):
        check_prompt(output)


def check_preemption(make_llm: MakeLLM, depth: int) -> None:
    """Who loses its blocks in the middle of its prompt finds what it published, and is scored where it goes on."""
    llm = make_llm(policy="priority", preempt_for_waiting=True, num_blocks=20, max_num_batched_tokens=16, overlap_depth=depth)
    long = list(range(120))
    outputs: list[RequestOutput] = []
    low = llm.add_request({"prompt_token_ids": long}, ASKED, priority=5)
    for _ in range(4):
        outputs += llm.step()
    llm.add_request({"prompt_token_ids": PROMPTS[2]}, ASKED, priority=-5)
    while llm.has_unfinished_requests():
        outputs += llm.step()
    assert len(outputs) == 2
    for output in outputs:
        check_prompt(output)
        assert output.metrics is not None
        assert output.metrics.num_preemptions == (output.request_id == low)
    check_empty(llm)


@pytest.mark.parametrize("depth", [1, 2])
def test_who_is_preempted_in_the_middle_of_a_prompt_is_scored_to_its_end(depth: int, make_llm: MakeLLM) -> None:
    check_preemption(make_llm, depth)


def check_failures(make_llm: MakeLLM, depth: int) -> None:
    """A step that fails when all its rows were scored, wrongly, is computed again."""
    llm = make_llm(max_num_batched_tokens=16, overlap_depth=depth)
    take, spoils = PromptRows.take, [False]

    def taken(self: PromptRows, first: int, logits: torch.Tensor) -> None:
        take(self, first, logits * 0.5 if spoils[0] else logits)

    def fault(plan: Any, forward: Any) -> Any:
        spoils[0] = True
        forward()
        spoils[0] = False
        raise RuntimeError("no model")

    with pytest.MonkeyPatch.context() as patch, faulty_model(llm, fault, {1, 4, 5}):
        patch.setattr(PromptRows, "take", taken)
        outputs = llm.generate(given(PROMPTS), ASKED)
    for output in outputs:
        check_prompt(output)
    check_empty(llm)


@pytest.mark.parametrize("depth", [1, 2])
def test_a_step_that_fails_changes_nothing(depth: int, make_llm: MakeLLM) -> None:
    check_failures(make_llm, depth)


def check_pieces(make_llm: MakeLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Logits lie in memory some rows at a time, and the layers run once a step."""
    sizes: list[int] = []
    own = PromptRows.take

    def noted(self: PromptRows, first: int, logits: torch.Tensor) -> None:
        sizes.append(len(logits))
        own(self, first, logits)

    monkeypatch.setattr(PromptRows, "take", noted)
    monkeypatch.setattr(packed_forward, "PIECE_BYTES", 4 * VOCAB_SIZE * 5)
    model = make_model()
    llm = make_llm(model=model, max_num_batched_tokens=64)
    layers: list[int] = []
    model.model.layers[0].register_forward_hook(lambda *_: layers.append(1))
    [output] = llm.generate(given([PROMPTS[2]]), SamplingParams(max_tokens=1, prompt_logprobs=BEST))
    check_prompt(output)
    assert sum(sizes) == len(PROMPTS[2]) - 1
    assert max(sizes) == 5
    assert len(layers) == 2, "two chunks"
    assert "forward" not in vars(model.model)


def test_a_long_prompts_logits_never_lie_in_memory_at_once(make_llm: MakeLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    check_pieces(make_llm, monkeypatch)


def test_several_answers_share_their_prompts(make_llm: MakeLLM) -> None:
    llm = make_llm(max_num_batched_tokens=16)
    params = SamplingParams(n=3, seed=1, max_tokens=6, ignore_eos=True, prompt_logprobs=BEST, logprobs=1)
    [output] = llm.generate(given([PROMPTS[3]]), params)
    assert len(output.outputs) == 3
    check_prompt(output)
    assert all(len(one.logprobs or ()) == 6 for one in output.outputs)


@pytest.mark.parametrize("kind", RequestOutputKind)
def test_every_output_has_them_from_the_first_token_on(kind: RequestOutputKind, make_async: MakeAsync) -> None:
    engine = make_async()

    async def main() -> None:
        params = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True, prompt_logprobs=BEST, output_kind=kind)
        async for output in engine.generate({"prompt_token_ids": PROMPTS[3]}, params):
            check_prompt(output)

    asyncio.run(main())


def test_they_are_shown_with_their_texts_and_travel(llm: LLM) -> None:
    [output] = llm.generate("Hello", SamplingParams(max_tokens=1, prompt_logprobs=0))
    told = output.prompt_logprobs
    assert told is not None
    assert [None if one is None else [other.decoded_token for other in one.values()] for one in told] == [
        None, ["e"], ["l"], ["l"], ["o"]
    ]  # fmt: skip
    assert output.prompt_logprobs is told, "unpacked once"
    for other in (pickle.loads(pickle.dumps(output)), copy.deepcopy(output)):
        assert other == output
        assert other.prompt_logprobs == told
        assert other.tokenizer is None


def test_more_than_the_engine_gives_are_refused(make_llm: MakeLLM) -> None:
    llm = make_llm(max_logprobs=2)
    for value in (3, -1, 1025, True, "1"):
        with pytest.raises(InvalidInputError) as refusal:
            llm.generate("x", SamplingParams(max_tokens=1, prompt_logprobs=value))  # type: ignore[arg-type]
        assert refusal.value.field == "prompt_logprobs"
    check_empty(llm)


def test_an_aborted_prompt_has_none_yet(llm: LLM) -> None:
    number = llm.add_request({"prompt_token_ids": list(range(200))}, ASKED)
    llm.step()
    llm.abort(number)
    outputs: list[RequestOutput] = []
    while llm.has_unfinished_requests() or not outputs:
        outputs += llm.step()
    assert outputs[0].prompt_logprobs is None
    check_empty(llm)


def check_nan(make_llm: MakeLLM) -> None:
    """Logits that hold no distribution end their own request, and minus infinity is told as the lowest."""
    llm = make_llm()
    take = PromptRows.take

    def spoiled(self: PromptRows, first: int, logits: torch.Tensor) -> None:
        logits[:, 50:] = float("-inf")
        logits[self.rows[first : first + len(logits)] == 3, 2] = float("nan")
        take(self, first, logits)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PromptRows, "take", spoiled)
        one, other = llm.generate(given([PROMPTS[3], [1, 60]]), ASKED)
    assert (one.outputs[0].finish_reason, other.outputs[0].finish_reason) == ("error", "length")
    told = other.prompt_logprobs
    assert told is not None
    assert told[1] is not None
    assert told[1][60].logprob == LOWEST_LOGPROB
    check_empty(llm)


def test_logits_without_a_distribution_end_their_own_request(make_llm: MakeLLM) -> None:
    check_nan(make_llm)


def test_who_does_not_ask_pays_nothing(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """No object of it is made for a step, and the model is asked as ever."""

    def never(*_: Any) -> Any:
        raise AssertionError("nobody asked")

    llm.generate(given(PROMPTS[:1]), ASKED)
    monkeypatch.setattr(PromptRows, "of", never)
    monkeypatch.setattr(packed_forward, "_computed_once", never)
    llm.generate(given(PROMPTS), PLAIN)
    # Whose prompt is scored asks no more while it answers.
    assert not loop_of(llm)._roster.rows._scoring


def test_planted_faults_are_caught(make_llm: MakeLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        # What is in the cache is not computed, and so not scored.
        patch.setattr(roster.secrets, "token_hex", lambda size: "x")
        with pytest.raises(AssertionError):
            check_way(make_llm, "plain", 1)
    with monkeypatch.context() as patch:
        # The row of a token in place of the one before it.
        own = PromptScores.unknown
        patch.setattr(PromptScores, "unknown", lambda self, positions: np.minimum(own(self, positions) + 1, len(positions) - 1))
        with pytest.raises((AssertionError, IndexError)):
            check_way(make_llm, "plain", 1)
    with monkeypatch.context() as patch:
        # Each chunk begins anew.
        note = PromptScores.note

        def forgetting(self: PromptScores, *arguments: Any) -> Any:
            lost = note(self, *arguments)
            self.is_complete = True
            return lost

        patch.setattr(PromptScores, "note", forgetting)
        with pytest.raises(AssertionError):
            check_way(make_llm, "chunks", 1)
    with monkeypatch.context() as patch:
        # Who is preempted begins anew, and is not scored where the cache has it.
        enters = LiveRequest.enters

        def anew(self: LiveRequest, now_ns: int) -> None:
            enters(self, now_ns)
            self.prompt_scores = PromptScores(self.prompt.array, BEST)

        patch.setattr(LiveRequest, "enters", anew)
        with pytest.raises(AssertionError):
            check_preemption(make_llm, 1)
    with monkeypatch.context() as patch:
        # A step counts before it went well.
        take = PromptRows.take

        def hasty(self: PromptRows, first: int, logits: torch.Tensor) -> None:
            take(self, first, logits)
            assert list(self.hand_out()) == []

        patch.setattr(PromptRows, "take", hasty)
        with pytest.raises(AssertionError):
            check_failures(make_llm, 1)
    with monkeypatch.context() as patch:
        # All logits at once.
        patch.setattr(packed_forward, "max", lambda *_: 10**6, raising=False)
        with pytest.raises(AssertionError):
            check_pieces(make_llm, patch)
    with monkeypatch.context() as patch:
        # The whole model for each piece.
        patch.setattr(packed_forward, "_computed_once", lambda model: nullcontext())
        with pytest.raises(AssertionError):
            check_pieces(make_llm, patch)
    with monkeypatch.context() as patch:
        # NaN is told.
        patch.setattr(hand_out.HandOut, "note_scores", lambda self, scored: list(self._roster.rows.note_scores(scored)))
        with pytest.raises(AssertionError):
            check_nan(make_llm)
