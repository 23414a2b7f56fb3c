"""Promise: an output has log probabilities for each of its tokens, the ones that it gives out with them, however it is read and
however it ends; whoever does not ask has none."""

import asyncio
import copy
import pickle
from typing import Any

import pytest

from blocktable import LLM, RequestOutputKind, SamplingParams
from blocktable.engine.hand_out import HandOut
from blocktable.engine.mailbox import _Unread
from blocktable.engine.token_logprobs import LogprobLog, TokenLogprobs
from blocktable.errors import InvalidInputError
from blocktable.sampling.logprobs import LOWEST_LOGPROB, StepLogprobs

from .conftest import MakeAsync, MakeLLM
from .faults import changing, faulty_model, loop_of
from .test_failures import SHARING, lose_the_writer
from .test_history import PROMPTS
from .ways import check_empty

ASKED = SamplingParams(temperature=1.0, seed=3, max_tokens=20, ignore_eos=True, logprobs=2, frequency_penalty=0.5)
STOPPING = SamplingParams(temperature=1.0, seed=3, max_tokens=24, ignore_eos=True, logprobs=1, stop=["e", "a", "t", "\x1d"])


def whole(llm: LLM, params: SamplingParams = ASKED) -> list[Any]:
    outputs = [output.outputs[0] for output in llm.generate(PROMPTS, params)]
    for one in outputs:
        assert len(one.logprobs) == len(one.token_ids)
        assert all(token_id in told for token_id, told in zip(one.token_ids, one.logprobs))
    return [(one.token_ids, one.logprobs, one.cumulative_logprob) for one in outputs]


def check_streams(llm: LLM, params: SamplingParams = ASKED) -> None:
    right = whole(llm, params)
    found: list[Any] = [([], [], 0.0) for _ in PROMPTS]
    with llm.stream(PROMPTS, params) as stream:
        for place, output in stream:
            one = output.outputs[0]
            assert one.logprobs is not None
            assert len(one.logprobs) == len(one.token_ids)
            ids, told, _ = found[place]
            found[place] = (ids + list(one.token_ids), told + one.logprobs, one.cumulative_logprob)
    for (ids, told, cumulative), (right_ids, right_told, right_cumulative) in zip(found, right, strict=True):
        assert ids == right_ids
        assert [list(one) for one in told] == [list(one) for one in right_told]
        assert cumulative == pytest.approx(right_cumulative, abs=1e-3)
    check_empty(llm)


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("params", [ASKED, STOPPING], ids=["to the end", "stop strings"])
def test_a_stream_has_those_of_its_new_tokens(params: SamplingParams, depth: int, make_llm: MakeLLM) -> None:
    check_streams(make_llm(overlap_depth=depth, num_blocks=14), params)


@pytest.mark.parametrize("kind", RequestOutputKind)
def test_every_kind_of_output_has_those_of_its_tokens(
    kind: RequestOutputKind, make_async: MakeAsync, make_llm: MakeLLM
) -> None:
    right_ids, right, cumulative = whole(make_llm())[1]
    engine = make_async()

    async def main() -> None:
        ids: list[int] = []
        told: list[Any] = []
        options = {field: getattr(ASKED, field) for field in SamplingParams.__dataclass_fields__}
        async for output in engine.generate(PROMPTS[1], SamplingParams(**options | {"output_kind": kind})):
            one = output.outputs[0]
            assert one.logprobs is not None
            assert len(one.logprobs) == len(one.token_ids)
            if kind is not RequestOutputKind.DELTA:
                ids, told = [], []
            ids += one.token_ids
            told += one.logprobs
        assert one.cumulative_logprob == pytest.approx(cumulative, abs=1e-3)
        assert ids == right_ids
        assert [list(one) for one in told] == [list(one) for one in right]

    asyncio.run(main())


def test_a_token_is_shown_with_rank_and_text(llm: LLM) -> None:
    [output] = llm.generate("Hello", SamplingParams(temperature=0, max_tokens=8, logprobs=3, logit_bias={65: 100, 257: 50}))
    told = output.outputs[0].logprobs
    assert told is not None
    own = told[0][65]
    assert own.decoded_token == "b"
    assert own.rank > 3
    assert LOWEST_LOGPROB < own.logprob < -1, "they are those before the bias"
    assert [one.rank for one in told[0].values()] == [own.rank, 1, 2, 3]
    falling = [one.logprob for one in list(told[0].values())[1:]]
    assert falling == sorted(falling, reverse=True)
    assert output.outputs[0].logprobs is told, "unpacked once"
    for other in (pickle.loads(pickle.dumps(output)), copy.deepcopy(output)):
        assert other == output
        assert other.outputs[0].logprobs == told
        assert other.outputs[0].tokenizer is None


def test_zero_is_the_token_alone_and_none_is_nothing(llm: LLM) -> None:
    params = [SamplingParams(max_tokens=5, ignore_eos=True, seed=1, logprobs=count) for count in (0, None)]
    zero, none = (output.outputs[0] for output in llm.generate(PROMPTS[:2], params))
    assert zero.logprobs is not None
    assert [list(told) for told in zero.logprobs] == [[token_id] for token_id in zero.token_ids]
    assert none.logprobs is None
    assert none.cumulative_logprob is None


def test_more_than_the_engine_gives_are_refused(make_llm: MakeLLM) -> None:
    for options, most in (({}, 20), ({"max_logprobs": 3}, 3), ({"max_logprobs": 0}, 0)):
        llm = make_llm(**options)
        llm.generate(PROMPTS[0], SamplingParams(max_tokens=1, logprobs=most))
        with pytest.raises(InvalidInputError) as refusal:
            llm.generate(PROMPTS[0], SamplingParams(max_tokens=1, logprobs=most + 1))
        assert refusal.value.field == "logprobs"
        check_empty(llm)
    for value in (-1, 1025, True, None):
        with pytest.raises(InvalidInputError) as refusal:
            make_llm(max_logprobs=value)
        assert refusal.value.field == "max_logprobs"


def test_logits_that_are_minus_infinity_are_told_as_the_lowest(llm: LLM) -> None:
    def forbid(plan: Any, logits: Any) -> None:
        logits[:, 3:] = float("-inf")

    with faulty_model(llm, changing(forbid)):
        [output] = llm.generate(PROMPTS[0], SamplingParams(max_tokens=4, logprobs=5, ignore_eos=True, seed=1))
    told = output.outputs[0].logprobs
    assert told is not None
    for one in told:
        assert sorted(one) == [0, 1, 2, 3, 4]
        assert [one[token_id].logprob for token_id in (3, 4)] == [LOWEST_LOGPROB] * 2


def check_aborts(llm: LLM) -> None:
    """Ended in the middle, by its caller or because its block was lost, it has one for each token that counts."""
    with faulty_model(llm, lose_the_writer(llm, "nan"), {0}):
        [lost, *others] = [output.outputs[0] for output in llm.generate(SHARING, ASKED)]
    assert lost.logprobs == []
    for one in others:
        assert [next(iter(told)) for told in one.logprobs or []] == one.token_ids
    ids = [llm.add_request(prompt, ASKED) for prompt in PROMPTS]
    outputs = [output for _ in range(7) for output in llm.step()]
    for number in ids:
        llm.abort(number)
    while llm.has_unfinished_requests():
        outputs += llm.step()
    for output in outputs:
        one = output.outputs[0]
        assert one.logprobs is not None
        assert len(one.logprobs) == len(one.token_ids) > 0
    assert not any(request.logprobs for request in loop_of(llm)._roster.all())


@pytest.mark.parametrize("depth", [1, 2])
def test_an_end_in_the_middle_leaves_one_for_each_token(depth: int, make_llm: MakeLLM) -> None:
    llm = make_llm(overlap_depth=depth)
    check_aborts(llm)


# Planted: each must fail a check above.


def test_those_of_dropped_tokens_are_caught(make_llm: MakeLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StepLogprobs, "without", lambda self, is_lost: self)
    with pytest.raises(AssertionError):
        check_aborts(make_llm())


def test_a_mailbox_that_keeps_the_last_ones_only_is_caught(
    make_async: MakeAsync, make_llm: MakeLLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    put = _Unread.put

    def last_only(self: _Unread, answer: Any) -> None:
        self.logprobs = None
        put(self, answer)

    monkeypatch.setattr(_Unread, "put", last_only)
    with pytest.raises(AssertionError):
        test_every_kind_of_output_has_those_of_its_tokens(RequestOutputKind.CUMULATIVE, make_async, make_llm)


def test_those_that_come_behind_their_text_are_caught(make_llm: MakeLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    note, held = HandOut._note_logprobs, []

    def later(self: HandOut, step: Any, told: Any) -> None:
        held.append((step, told))
        if len(held) > 1:
            note(self, *held.pop(0))

    monkeypatch.setattr(HandOut, "_note_logprobs", later)
    with pytest.raises((AssertionError, StopIteration)):
        check_streams(make_llm())


def test_a_packed_run_is_unpacked_as_it_was(llm: LLM) -> None:
    import numpy as np

    log = LogprobLog(1)
    told = StepLogprobs(
        np.array([0]), np.array([[5, 6, 9]], dtype=np.int32), np.array([[-2, -1, 0]], dtype=np.float32), np.array([2], np.int32)
    )
    log.add(told, 0)
    log.add(told, 0)
    run = log.take()
    assert (len(run), len(log.take()), log.cumulative) == (2, 0, -4.0)
    both = TokenLogprobs(1)
    both.extend(run)
    both.extend(run.copy())
    for one in both.by_token(None):
        assert {token_id: (told.logprob, told.rank) for token_id, told in one.items()} == {5: (-2.0, 2), 6: (-1.0, 1)}
    assert len(both) == 4
