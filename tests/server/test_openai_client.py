"""Promise: the official `openai` client works: completions and chats, streamed or not, and every refusal is the exception it
should be."""

import asyncio
import json
import re

import jsonschema_rs
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


def test_an_async_client_reads_many_streams_at_once(server: Live) -> None:
    async def read() -> list[str]:
        async with openai.AsyncOpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as client:

            async def one(place: int) -> str:
                stream = await client.completions.create(
                    model="tiny",
                    prompt=[place, 2, 3],
                    temperature=0,
                    max_tokens=20,
                    stream=True,
                    extra_body={"ignore_eos": True},
                )
                return "".join([piece.choices[0].text async for piece in stream])

            return await asyncio.gather(*map(one, range(20)))

    texts = asyncio.run(read())
    client = server.client()
    for place, text in enumerate(texts):
        ask = {"prompt": [place, 2, 3], "temperature": 0, "max_tokens": 20, "ignore_eos": True}
        assert client.post("/v1/completions", json=ask).json()["choices"][0]["text"] == text


POINT = {
    "type": "object",
    "properties": {"x": {"type": "integer", "minimum": 0, "maximum": 99}, "is": {"enum": ["near", "far"]}},
    "required": ["x", "is"],
    "additionalProperties": False,
}
AS_POINT = {"type": "json_schema", "json_schema": {"name": "point", "schema": POINT, "strict": True}}


def test_an_answer_keeps_to_its_schema_streamed_or_not(client: openai.OpenAI, engine: AsyncLLM) -> None:
    more = {"structured_outputs": {"json": POINT, "disable_any_whitespace": True}}
    for ask in ({"response_format": AS_POINT}, {"extra_body": more}):
        for seed in range(4):
            ask = {"model": "tiny", "messages": MESSAGES, "seed": seed, "max_tokens": 200} | ask
            whole = client.chat.completions.create(**ask).choices[0]
            assert whole.finish_reason == "stop"
            assert jsonschema_rs.is_valid(POINT, json.loads(whole.message.content or ""))
            stream = list(client.chat.completions.create(**ask, stream=True))
            assert "".join(piece.choices[0].delta.content or "" for piece in stream) == whole.message.content
            assert stream[-1].choices[0].finish_reason == "stop"
    check_empty(engine)


def test_other_shapes_of_completions(client: openai.OpenAI) -> None:
    for shape, right in (
        ({"choice": ["yes", "no"]}, "yes|no"),
        ({"regex": "a{2,4}b"}, "a{2,4}b"),
        ({"grammar": 'start: "x"'}, "x"),
    ):
        ask = {"model": "tiny", "prompt": "Hello", "n": 3, "seed": 1, "extra_body": {"structured_outputs": shape}}
        for choice in client.completions.create(**ask).choices:
            assert re.fullmatch(right, choice.text)
            assert choice.finish_reason == "stop"
    anything = client.chat.completions.create(model="tiny", messages=MESSAGES, response_format={"type": "text"}, max_tokens=3)
    assert anything.choices[0].finish_reason == "length"


def test_a_schema_that_nothing_satisfies_is_a_bad_request(client: openai.OpenAI) -> None:
    nothing = {"type": "json_schema", "json_schema": {"name": "none", "schema": {"enum": []}}}
    with pytest.raises(openai.BadRequestError) as refusal:
        client.chat.completions.create(model="tiny", messages=MESSAGES, response_format=nothing)
    assert (refusal.value.param, refusal.value.code) == ("response_format", "invalid_grammar")


def test_several_answers_share_the_prompt_and_differ_by_seed(client: openai.OpenAI, engine: AsyncLLM) -> None:
    prompt = list(range(64))
    ask = {"model": "tiny", "prompt": prompt, "n": 4, "max_tokens": 12, "seed": 5, "extra_body": {"ignore_eos": True}}
    before = engine.scheduler.stats()["scheduled_tokens"]
    answer = client.completions.create(**ask)
    computed = engine.scheduler.stats()["scheduled_tokens"] - before
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert len({choice.text for choice in answer.choices}) == 4
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (64, 48)
    # The prompt once, and eleven outputs of each: the last is never an input.
    assert computed == 64 + 4 * 11
    again = client.completions.create(**ask)
    assert [choice.text for choice in again.choices] == [choice.text for choice in answer.choices]
    alone = client.completions.create(**ask | {"n": 1, "seed": 7})
    assert alone.choices[0].text == answer.choices[2].text
    assert again.usage.prompt_tokens_details.cached_tokens == 63


def test_several_answers_in_one_stream(client: openai.OpenAI) -> None:
    ask = {"model": "tiny", "messages": MESSAGES, "n": 3, "seed": 1, "max_tokens": 10, "extra_body": {"ignore_eos": True}}
    whole = client.chat.completions.create(**ask)
    texts, roles, ends = ["", "", ""], [0, 0, 0], [0, 0, 0]
    for piece in client.chat.completions.create(**ask, stream=True):
        [choice] = piece.choices
        texts[choice.index] += choice.delta.content or ""
        roles[choice.index] += choice.delta.role is not None
        ends[choice.index] += choice.finish_reason is not None
    assert texts == [choice.message.content for choice in whole.choices]
    assert (roles, ends) == ([1, 1, 1], [1, 1, 1])


def test_several_prompts_are_answered_in_their_order(client: openai.OpenAI) -> None:
    prompts = ["Once", "upon", "a time"]
    several = client.completions.create(model="tiny", prompt=prompts, temperature=0, max_tokens=5)
    alone = [client.completions.create(model="tiny", prompt=one, temperature=0, max_tokens=5) for one in prompts]
    assert [choice.text for choice in several.choices] == [answer.choices[0].text for answer in alone]
    assert several.usage.prompt_tokens == sum(map(len, prompts))


def test_models_are_listed_by_their_names(server: Live, client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").id == "tiny"
    assert client.completions.create(model="tiny", prompt="x", max_tokens=1).model == "tiny"


def test_embeddings_are_refused_by_name(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="embeddings are not served yet"):
        client.embeddings.create(model="tiny", input="x")


def test_an_answer_can_be_sent_back_as_it_came(client: openai.OpenAI) -> None:
    """With all the fields that the client's own record of it has."""
    first = client.chat.completions.create(model="tiny", messages=MESSAGES, max_tokens=5).choices[0].message
    messages = [*MESSAGES, first.model_dump(), {"role": "user", "content": "And?"}]
    assert client.chat.completions.create(model="tiny", messages=messages, max_tokens=5).usage.prompt_tokens > 40


def test_parts_of_a_message_are_joined(client: openai.OpenAI) -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    whole = client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": parts}], max_tokens=1)
    plain = client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "one\ntwo"}], max_tokens=1)
    assert whole.usage.prompt_tokens == plain.usage.prompt_tokens


def test_tokens_there_and_back(server: Live) -> None:
    client = server.client()
    text = "Hello <|end|> 日本 🇮🇸"
    found = client.post("/tokenize", json={"prompt": text, "return_token_strs": True}).json()
    assert found["count"] == len(found["tokens"]) == len(found["token_strs"])
    assert found["max_model_len"] == 256
    assert "<|end|>" in found["token_strs"]
    assert client.post("/detokenize", json={"tokens": found["tokens"]}).json() == {"prompt": text}
    chat = client.post("/tokenize", json={"messages": MESSAGES}).json()
    said = client.post("/detokenize", json={"tokens": chat["tokens"]}).json()["prompt"]
    assert said == "<|start|>user: Hello\n<|start|>assistant:"
    assert client.post("/detokenize", json={"tokens": []}).json() == {"prompt": ""}


def test_the_document_is_one_and_the_version_is_ours(server: Live) -> None:
    from blocktable import __version__

    client = server.client()
    assert client.get("/version").json() == {"version": __version__}
    document = client.get("/openapi.json").json()
    assert document["info"]["version"] == __version__
    assert set(document["paths"]) >= {"/v1/completions", "/v1/chat/completions", "/v1/embeddings", "/v1/models/{id}"}
