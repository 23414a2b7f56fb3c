"""Promise: the log probabilities of prompts arrive as vLLM shapes them, those of the engine's own: beside each answer of a
completion and beside a chat, whatever the answers are cut into and wherever the engine runs."""

from typing import Any

import numpy as np
import openai
import pytest

from blocktable import AsyncLLM, SamplingParams
from blocktable.server import engine_sender, frames, generation
from blocktable.server.engine_client import Piece, PromptLogprobs
from blocktable.server.frames import FrameReader
from blocktable.server.wire import Pieces
from tests.engine.ways import check_empty

from .conftest import MakeServer
from .live import Live
from .processes import Served, read, request

PROMPTS = ["Hello", "Once upon a time"]


@pytest.fixture
def client(server: Live) -> openai.OpenAI:
    return server.openai()


def engine_says(engine: AsyncLLM, prompt: Any, count: int) -> list[Any]:
    """In the shape of vLLM's server."""
    params = SamplingParams(max_tokens=1, prompt_logprobs=count)
    [output] = [output for output in engine.generate_blocking(prompt, params) if output.finished]
    told = output.prompt_logprobs
    assert told is not None
    names = ("logprob", "rank", "decoded_token")
    return [
        None
        if one is None
        else {str(token_id): {name: getattr(other, name) for name in names} for token_id, other in one.items()}
        for one in told
    ]


def near(told: list[Any]) -> list[Any]:
    """The same, but for rounding."""
    return [
        None
        if one is None
        else {key: other | {"logprob": pytest.approx(other["logprob"], abs=1e-3)} for key, other in one.items()}
        for one in told
    ]


def check_completions(client: openai.OpenAI, engine: AsyncLLM, **more: Any) -> None:
    ask = {"model": "tiny", "prompt": PROMPTS, "n": 2, "max_tokens": 4, "seed": 1, "logprobs": 1} | more
    for count in (0, 3):
        choices = client.completions.create(**ask, extra_body={"prompt_logprobs": count, "ignore_eos": True}).choices
        assert [choice.index for choice in choices] == [0, 1, 2, 3]
        for choice in choices:
            told = choice.prompt_logprobs  # type: ignore[attr-defined]
            assert told == near(engine_says(engine, PROMPTS[choice.index // 2], count))
            assert len(choice.logprobs.tokens) == 4
    check_empty(engine)


def test_each_answer_of_a_completion_has_those_of_its_prompt(client: openai.OpenAI, engine: AsyncLLM) -> None:
    check_completions(client, engine)
    check_completions(client, engine, best_of=3)


def test_answers_that_are_asked_for_in_parts_have_them_too(make_async: Any, serve: MakeServer) -> None:
    engine = make_async(max_num_seqs=1)
    check_completions(serve(engine).openai(), engine)


def test_a_chat_has_them_beside_its_answers(client: openai.OpenAI, engine: AsyncLLM, server: Live) -> None:
    messages: list[Any] = [{"role": "user", "content": "Hello"}]
    ids = server.client().post("/tokenize", json={"messages": messages}).json()["tokens"]
    answer = client.chat.completions.create(
        model="tiny", messages=messages, n=2, max_tokens=1, extra_body={"prompt_logprobs": 2}
    )
    assert answer.prompt_logprobs == near(engine_says(engine, {"prompt_token_ids": ids}, 2))  # type: ignore[attr-defined]
    assert answer.usage is not None
    assert answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens_details.cached_tokens == 0
    plain = server.client().post("/v1/chat/completions", json={"messages": messages, "max_tokens": 1}).json()
    assert plain["prompt_logprobs"] is None


def test_whose_prompt_was_not_computed_has_none(client: openai.OpenAI) -> None:
    more = {"prompt_logprobs": 1, "deadline_s": 1e-6}
    [choice] = client.completions.create(model="tiny", prompt=PROMPTS[0], extra_body=more).choices
    assert choice.finish_reason == "abort"
    assert choice.prompt_logprobs is None  # type: ignore[attr-defined]


def test_more_than_a_reply_can_hold_are_refused(server: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two prompts of 3 and 2 tokens, two answers each, and two best ones beside each token."""
    ask = {"prompt": [[5, 6, 7], [5, 6]], "n": 2, "max_tokens": 1, "prompt_logprobs": 2}
    for most, status in ((30, 200), (29, 400)):
        monkeypatch.setattr(generation, "MOST_SCORED", most)
        answer = server.client().post("/v1/completions", json=ask)
        assert answer.status_code == status
    assert answer.json()["error"]["param"] == "prompt_logprobs"
    assert "are 30: at most 29" in answer.json()["error"]["message"]


def test_they_come_from_a_process_of_its_own(served: Served) -> None:
    """Whose model says the next number, and little else."""
    asked = request([5, 6, 9], 2, "scored", is_streamed=False)
    asked.sampling["prompt_logprobs"] = 1
    [piece] = served.run(read(served.client, asked))
    assert piece.prompt_logprobs is not None
    assert np.frombuffer(piece.prompt_logprobs.ids, dtype=np.int32).tolist() == [6, 6, 9, 7]
    assert np.frombuffer(piece.prompt_logprobs.values, dtype=np.float32) == pytest.approx([0, 0, -20, 0], abs=1e-3)
    assert np.frombuffer(piece.prompt_logprobs.ranks, dtype=np.int32).tolist() == [1, 10]


def check_frames(num_pieces: int) -> None:
    """Prompts that come at once and together are longer than a frame may be arrive as they are."""
    told = PromptLogprobs(20, b"i" * 40_000, b"v" * 40_000, b"r" * 2_000)
    pieces = [Piece(str(place), [1], "stop", prompt_logprobs=told) for place in range(num_pieces)]
    reader: FrameReader[Pieces] = FrameReader(Pieces)
    sent = [frames.frame(records) for records in engine_sender._split([7] * num_pieces, pieces)]
    assert [piece for one in sent for record in reader.feed(one) for piece in record.pieces] == pieces


def test_long_prompts_are_sent_in_several_frames(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frames, "MAX_FRAME", 2**19)
    monkeypatch.setattr(engine_sender, "MAX_PIECES_BYTES", 2**18)
    check_frames(20)
    monkeypatch.setattr(engine_sender, "_num_bytes", lambda piece: len(piece.text))
    with pytest.raises(frames.FrameError):
        check_frames(20)


def test_a_prompt_that_goes_to_the_wrong_answer_is_caught(
    client: openai.OpenAI, engine: AsyncLLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Planted: they are those of the last prompt for all."""
    own = generation.Generation.written_prompts

    async def last(self: generation.Generation) -> list[bytes]:
        told = await own(self)
        return [told[-1]] * len(told)

    monkeypatch.setattr(generation.Generation, "written_prompts", last)
    with pytest.raises(AssertionError):
        check_completions(client, engine)
