"""Promise: every request ends exactly once, with the reason that the table says, and its text ends there too: an end token, a
stop token, a stop string, a limit, an abort; with `min_tokens`, `ignore_eos`, streamed or not."""

from dataclasses import dataclass
from typing import Any

import pytest
import torch

from blocktable import LLM, RequestOutput, SamplingParams
from blocktable.engine.batch import Batch
from blocktable.errors import ShutDownError

from .conftest import MakeLLM
from .faults import changing, faulty_model
from .tiny_llama import END, END_ID, MAX_MODEL_LEN, make_model
from .ways import check_empty

PROMPT = {"prompt_token_ids": list(range(40, 60))}


def run(llm: LLM, params: SamplingParams, streamed: bool) -> RequestOutput:
    """The whole output; a stream's pieces are put together, and its last one must be the only one that ends."""
    if not streamed:
        return llm.generate(PROMPT, params)[0]
    pieces = [output for _, output in llm.stream(PROMPT, params)]
    assert [piece.finished for piece in pieces].count(True) == 1
    last = pieces[-1]
    last.outputs[0].text = "".join(piece.outputs[0].text for piece in pieces)
    last.outputs[0].token_ids = [token for piece in pieces for token in piece.outputs[0].token_ids]
    return last


@dataclass(frozen=True)
class Free:
    """What the model says when nothing ends it: tokens, and the text of each."""

    tokens: list[int]
    texts: list[str]

    @property
    def text(self) -> str:
        return "".join(self.texts)


@pytest.fixture
def free(make_llm: MakeLLM) -> Free:
    """24 tokens drawn with a fixed seed that are letters, so that each token is a character."""
    llm = make_llm()
    tokens = list(llm.generate(PROMPT, drawn(max_tokens=24))[0].outputs[0].token_ids)
    tokenizer = llm._open.tokenizer
    assert tokenizer is not None
    return Free(tokens, [tokenizer.decode([token]) for token in tokens])


def drawn(**options: Any) -> SamplingParams:
    """Drawn, not greedy: a random model repeats itself, and every token of these is met once or twice."""
    return SamplingParams(**({"temperature": 1.0, "seed": 3, "ignore_eos": True} | options))


def first_at(free: Free, at: int) -> int:
    """A place from `at` on whose token did not come before and whose text is a plain letter or sign."""
    for place in range(at, len(free.tokens)):
        plain = len(free.texts[place]) == 1 and free.texts[place].isprintable() and free.texts[place] != "\ufffd"
        if plain and free.tokens[place] not in free.tokens[:place] and free.texts[place] not in free.text[:place]:
            return place
    raise AssertionError("no such token in this text: choose another seed")


@pytest.mark.parametrize("streamed", [False, True], ids=["whole", "streamed"])
class TestEnds:
    def test_max_tokens(self, streamed: bool, llm: LLM, free: Free) -> None:
        for count in (1, 2, 9):
            output = run(llm, drawn(max_tokens=count), streamed)
            answer = output.outputs[0]
            assert (answer.finish_reason, answer.stop_reason) == ("length", None)
            assert answer.token_ids == free.tokens[:count]
        check_empty(llm)

    def test_the_length_of_the_model(self, streamed: bool, llm: LLM) -> None:
        answer = run(llm, SamplingParams(temperature=0, max_tokens=None, ignore_eos=True), streamed).outputs[0]
        assert answer.finish_reason == "length"
        assert len(answer.token_ids) == MAX_MODEL_LEN - len(PROMPT["prompt_token_ids"])
        check_empty(llm)

    def test_a_stop_token_is_kept_among_the_ids_and_left_out_of_the_text(self, streamed: bool, llm: LLM, free: Free) -> None:
        place = first_at(free, 3)
        token = free.tokens[place]
        answer = run(llm, drawn(max_tokens=24, stop_token_ids=[token, 270]), streamed).outputs[0]
        assert (answer.finish_reason, answer.stop_reason) == ("stop", token)
        assert answer.token_ids == free.tokens[: place + 1]
        assert answer.text == decode(llm, free.tokens[:place])
        shown = run(llm, drawn(max_tokens=24, stop_token_ids=[token], include_stop_str_in_output=True), streamed).outputs[0]
        assert shown.text == decode(llm, free.tokens[: place + 1])
        check_empty(llm)

    def test_the_model_s_own_end_token(self, streamed: bool, make_llm: MakeLLM, free: Free) -> None:
        place = first_at(free, 3)
        llm = make_llm(model=make_model(eos_token_id=free.tokens[place]))
        ended = run(llm, drawn(max_tokens=24, ignore_eos=False), streamed).outputs[0]
        assert (ended.finish_reason, ended.stop_reason) == ("stop", None)
        assert ended.token_ids == free.tokens[: place + 1]
        ignored = run(llm, drawn(max_tokens=24, ignore_eos=True), streamed).outputs[0]
        assert (ignored.finish_reason, ignored.token_ids) == ("length", free.tokens)

    def test_a_stop_string_ends_the_text_before_it(self, streamed: bool, llm: LLM, free: Free) -> None:
        place = first_at(free, 3)
        stop = free.texts[place]
        answer = run(llm, drawn(max_tokens=24, stop=["never", stop]), streamed).outputs[0]
        assert (answer.finish_reason, answer.stop_reason) == ("stop", stop)
        assert answer.token_ids == free.tokens[: place + 1]
        assert answer.text == decode(llm, free.tokens[:place])
        shown = run(llm, drawn(max_tokens=24, stop=stop, include_stop_str_in_output=True), streamed).outputs[0]
        assert shown.text == decode(llm, free.tokens[: place + 1])
        check_empty(llm)

    def test_a_stop_string_at_the_last_allowed_token_is_a_stop(self, streamed: bool, llm: LLM, free: Free) -> None:
        place = first_at(free, 3)
        answer = run(llm, drawn(max_tokens=place + 1, stop=free.texts[place]), streamed).outputs[0]
        assert (answer.finish_reason, answer.stop_reason) == ("stop", free.texts[place])
        check_empty(llm)

    def test_nothing_ends_the_text_before_min_tokens(self, streamed: bool, make_llm: MakeLLM, free: Free) -> None:
        """End tokens cannot be chosen before, which changes what is drawn; stop strings are met and do not count."""
        place = first_at(free, 3)
        token, text = free.tokens[place], free.texts[place]
        llm = make_llm(model=make_model(eos_token_id=token))
        for minimum in (place + 1, place + 4):
            for options in ({"ignore_eos": False}, {"stop_token_ids": [token]}):
                answer = run(llm, drawn(max_tokens=24, min_tokens=minimum, **options), streamed).outputs[0]
                assert token not in answer.token_ids[:minimum], options
                assert len(answer.token_ids) >= minimum
            answer = run(llm, drawn(max_tokens=24, min_tokens=minimum, stop=text), streamed).outputs[0]
            assert answer.token_ids[: minimum + 1] == free.tokens[: len(answer.token_ids)][: minimum + 1]
            assert len(answer.token_ids) > minimum
        answer = run(llm, drawn(max_tokens=24, min_tokens=place, stop=text), streamed).outputs[0]
        assert answer.token_ids == free.tokens[: place + 1], "the token after min_tokens others may end the text"
        check_empty(llm)

    def test_alone_and_too_big_for_the_pool(self, streamed: bool, make_llm: MakeLLM) -> None:
        """It is accepted, since it might have ended earlier; when it cannot grow any more, it ends."""
        llm = make_llm(num_blocks=5)  # 32 tokens
        answer = run(llm, SamplingParams(temperature=0, max_tokens=100, ignore_eos=True), streamed).outputs[0]
        assert answer.finish_reason == "abort"
        assert len(answer.token_ids) == 32 - len(PROMPT["prompt_token_ids"]) + 1, "the newest output has no row yet"
        check_empty(llm)

    def test_no_text_without_detokenising(self, streamed: bool, llm: LLM, free: Free) -> None:
        answer = run(llm, drawn(max_tokens=24, detokenize=False), streamed).outputs[0]
        assert (answer.text, answer.token_ids) == ("", free.tokens)


def decode(llm: LLM, tokens: list[int]) -> str:
    tokenizer = llm._open.tokenizer
    assert tokenizer is not None
    return tokenizer.decode(tokens)


def test_special_tokens_are_left_out_of_the_text_unless_wanted(make_llm: MakeLLM) -> None:
    """A model that says its end token over and over, which here ends nothing."""
    llm = make_llm()

    def say_end(plan: Any, logits: torch.Tensor) -> None:
        logits.zero_()
        logits[:, END_ID] = 1.0

    with faulty_model(llm, changing(say_end)):
        answer = llm.generate(PROMPT, SamplingParams(temperature=0, max_tokens=3, ignore_eos=True))[0].outputs[0]
        kept = llm.generate(PROMPT, SamplingParams(temperature=0, max_tokens=3, ignore_eos=True, skip_special_tokens=False))[0]
    assert (answer.token_ids, answer.text) == ([END_ID] * 3, "")
    assert kept.outputs[0].text == END * 3


def test_every_request_ends_once_whatever_happens_to_it(make_llm: MakeLLM) -> None:
    """Many at once, with ends of every kind, in a small pool: as many last outputs as requests, and counts that agree."""
    llm = make_llm(num_blocks=16, max_num_seqs=4, max_num_batched_tokens=16)
    kinds = [
        drawn(max_tokens=3),
        drawn(max_tokens=30, stop="e"),
        drawn(max_tokens=30, stop_token_ids=list(range(60, 110))),
        drawn(max_tokens=200),
        SamplingParams(temperature=0, max_tokens=10, ignore_eos=True),
    ]
    ids = [llm.add_request({"prompt_token_ids": [place + 1] * (1 + place % 30)}, kinds[place % 5]) for place in range(60)]
    ends: dict[str, int] = {}
    steps = 0
    while llm.has_unfinished_requests():
        if steps % 7 == 3:
            llm.abort(ids[steps % 60])
        for output in llm.step():
            assert output.finished
            assert output.outputs[0].finish_reason in ("stop", "length", "abort")
            ends[output.request_id] = ends.get(output.request_id, 0) + 1
        llm.scheduler.audit()
        steps += 1
    assert ends == dict.fromkeys(ids, 1)
    check_empty(llm)


@pytest.mark.parametrize("overlap_depth", [1, 2])
@pytest.mark.parametrize("is_kept_open", [False, True], ids=["as it is", "planted: a closed engine takes requests in"])
def test_a_call_that_a_shutdown_overtakes_ends(
    overlap_depth: int, is_kept_open: bool, make_llm: MakeLLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What had waited outside the full queue is not queued behind the shutdown: nobody runs it."""
    llm = make_llm(max_num_seqs=2, max_waiting=2, overlap_depth=overlap_depth)
    loop = llm._open.loop
    batch = Batch(
        loop, llm._open.intake.jobs(llm._open.intake.read([PROMPT] * 8), SamplingParams(max_tokens=4, ignore_eos=True))
    )
    with batch:
        outputs = batch.outputs()
        next(outputs)
        llm.shutdown()
        if is_kept_open:
            monkeypatch.setattr(loop, "_is_closed", False)
            monkeypatch.setattr(loop, "step", lambda: pytest.fail("a step of a closed engine"))
        with pytest.raises(pytest.fail.Exception if is_kept_open else ShutDownError):
            for _ in outputs:
                pass
    assert not loop.has_unfinished
