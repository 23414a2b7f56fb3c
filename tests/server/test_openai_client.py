"""Promise: the official `openai` client works: completions and chats, streamed or not, and every refusal is the exception it
should be."""

import openai
import pytest

from blocktable import AsyncLLM, SamplingParams
from tests.engine.ways import check_empty

from .live import Live

MESSAGES = [{"role": "user", "content": "Hello"}]


@pytest.fixture
def client(server: Live) -> openai.OpenAI:
    return server.openai()


def test_a_completion_is_the_engines_own_answer(client: openai.OpenAI, engine: AsyncLLM) -> None:
    direct = next(
        output
        for output in engine.generate_blocking("Hello", SamplingParams(temperature=0, max_tokens=20, ignore_eos=True))
        if output.finished
    )
    answer = client.completions.create(
        model="tiny", prompt="Hello", temperature=0, max_tokens=20, extra_body={"ignore_eos": True}
    )
    assert answer.object == "text_completion"
    assert answer.model == "tiny"
    [choice] = answer.choices
    assert choice.text == direct.outputs[0].text
    assert choice.finish_reason == "length"
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens, answer.usage.total_tokens) == (5, 20, 25)
    check_empty(engine)


def test_a_streamed_completion_is_the_same_text(client: openai.OpenAI) -> None:
    ask = {"model": "tiny", "prompt": "Once upon a time", "temperature": 0, "max_tokens": 30}
    whole = client.completions.create(**ask)
    stream = list(client.completions.create(**ask, stream=True, stream_options={"include_usage": True}))
    *pieces, usage = stream
    assert len(pieces) > 5
    assert "".join(piece.choices[0].text for piece in pieces) == whole.choices[0].text
    assert [piece.choices[0].finish_reason for piece in pieces] == [None] * (len(pieces) - 1) + ["length"]
    assert {piece.id for piece in stream} == {usage.id}
    assert usage.choices == []
    assert usage.usage.completion_tokens == 30
    assert all(piece.usage is None for piece in pieces)


def test_a_chat_streamed_or_not(client: openai.OpenAI) -> None:
    ask = {"model": "tiny", "messages": MESSAGES, "temperature": 0, "max_completion_tokens": 12}
    whole = client.chat.completions.create(**ask)
    assert whole.choices[0].message.role == "assistant"
    stream = list(client.chat.completions.create(**ask, stream=True))
    assert stream[0].choices[0].delta.role == "assistant"
    assert "".join(piece.choices[0].delta.content or "" for piece in stream) == whole.choices[0].message.content
    assert stream[-1].choices[0].finish_reason == whole.choices[0].finish_reason == "length"
    assert whole.usage.prompt_tokens == 1 + len("user: Hello\n") + 1 + len("assistant:")
