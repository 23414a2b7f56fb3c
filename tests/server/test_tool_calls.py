"""Promise: tools that are offered are called as the official client reads it, streamed or not: a call that is forced keeps to
its function's schema, one that the model chooses is read out of its text; answers and results go back into the prompt."""

import asyncio
import json
import threading
from collections.abc import AsyncGenerator, Callable, Iterator
from typing import Any

import jsonschema_rs
import numpy as np
import openai
import pytest

from blocktable import AsyncLLM
from blocktable.server import tool_events
from blocktable.server.engine_client import EngineRequest, Piece, PieceLogprobs
from blocktable.server.tools import tool_use
from blocktable.server.tools.call_reader import CallReader
from blocktable.text.tokenizer import Tokenizer
from blocktable.text.tokenizer_parts import TokenizerParts
from tests.engine.tiny_llama import CHAT_TEMPLATE, make_model, make_tokenizer
from tests.engine.ways import check_empty

from .conftest import MakeServer
from .fake_engine import FakeEngine
from .live import Live, events

TEMPLATE = (
    "{% if tools %}tools:{% for tool in tools %} {{ tool | tojson }}{% endfor %}\n"
    'Write <tool_call>{"name": <name>, "arguments": <object>}</tool_call>\n{% endif %}'
    "{% for message in messages %}<|start|>{{ message['role'] }}: {{ message['content'] }}"
    "{% for call in message['tool_calls'] or [] %}<tool_call>{{ call['function'] | tojson }}</tool_call>{% endfor %}\n"
    "{% endfor %}{% if add_generation_prompt %}<|start|>assistant:{% endif %}"
)
"""One with a place for tools, calls and their results, in Hermes' format."""

LOOK = {
    "type": "object",
    "properties": {"at": {"enum": ["sky", "sea"]}, "far": {"$ref": "#/$defs/Far"}},
    "required": ["at", "far"],
    "additionalProperties": False,
    "$defs": {"Far": {"type": "integer", "minimum": 0, "maximum": 9}},
}
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": "look", "description": "Looks.", "parameters": LOOK, "strict": True}},
    {"type": "function", "function": {"name": "go"}},
]
NOTHING = {"type": "object", "maxProperties": 0}
SCHEMAS = {"look": LOOK, "go": NOTHING}
CHOSEN: Any = {"type": "function", "function": {"name": "look"}}
MESSAGES: list[Any] = [{"role": "user", "content": "Hello"}]
ASK: dict[str, Any] = {"model": "tiny", "messages": MESSAGES, "tools": TOOLS}

SAID = (
    'Let me see.\n<tool_call>\n{"name": "look", "arguments": {"at": "sky", "far": 3}}\n</tool_call>\n<tool_call>{"name": "go"}'
)
SAID += "</tool_call>"


def with_template(template: str, special: tuple[str, ...] = ()) -> Any:
    """The small model's tokenizer, with this chat template and more special tokens."""
    tokenizer = make_tokenizer()
    tokenizer.chat_template = template
    tokenizer.add_special_tokens({"additional_special_tokens": list(special)})
    return tokenizer


class Speaking(FakeEngine):
    """Says a text, each answer its own, so many characters at a time; log probabilities if they are asked for."""

    def __init__(self, *texts: str, size: int = 3, reason: Any = "stop", tokenizer: Any = None) -> None:
        super().__init__(self.speak)
        self._texts, self._size, self._reason = texts, size, reason
        self._parts = Tokenizer(tokenizer or with_template(TEMPLATE)).parts()
        self.info = type(self.info)(**{name: getattr(self.info, name) for name in self.info.__struct_fields__} | {
            "vocab_size": 272, "max_model_len": 4096
        })  # fmt: skip

    async def read_tokenizer(self) -> TokenizerParts | None:
        return self._parts

    async def speak(self, request: EngineRequest) -> AsyncGenerator[Piece, None]:
        for index in range(request.sampling.get("n", 1)):
            text = self._texts[index % len(self._texts)]
            pieces = [text[place : place + self._size] for place in range(0, len(text), self._size)]
            for place, said in enumerate(pieces):
                await asyncio.sleep(0)
                reason = self._reason if place == len(pieces) - 1 else None
                piece = Piece(said, [65], reason, None, 0, index)
                if "logprobs" in request.sampling:
                    piece.logprobs = PieceLogprobs(0, np.int32(65).tobytes(), np.float32(-0.5).tobytes())
                yield piece


def gathered(stream: Any) -> dict[int, tuple[str | None, list[tuple[str, str]], str]]:
    """Of a stream's answers: content, (name, arguments) of calls, why it ended. Looks at the shape on the way."""
    content: dict[int, str] = {}
    calls: dict[int, list[list[str]]] = {}
    ends: dict[int, str] = {}
    ids: set[str] = set()
    for piece in stream:
        for choice in piece.choices:
            place = choice.index
            assert place not in ends
            content[place] = content.get(place, "") + (choice.delta.content or "")
            for part in choice.delta.tool_calls or ():
                own = calls.setdefault(place, [])
                if part.index == len(own):
                    assert part.type == "function"
                    assert part.id not in ids
                    ids.add(part.id)
                    own.append([part.function.name, ""])
                else:
                    assert part.index == len(own) - 1
                    assert part.id is part.type is part.function.name is None
                own[part.index][1] += part.function.arguments
            if choice.finish_reason is not None:
                ends[place] = choice.finish_reason
    told = {place: [(name, arguments) for name, arguments in own] for place, own in calls.items()}
    return {place: (content[place] or None, told.get(place, []), ends[place]) for place in content}


def told(answer: Any) -> dict[int, tuple[str | None, list[tuple[str, str]], str]]:
    """The same of a whole answer."""
    return {
        choice.index: (
            choice.message.content or None,
            [(call.function.name, call.function.arguments) for call in choice.message.tool_calls or ()],
            choice.finish_reason,
        )
        for choice in answer.choices
    }


@pytest.fixture
def calling(make_async: Callable[..., AsyncLLM], serve: MakeServer) -> Iterator[tuple[openai.OpenAI, Live]]:
    """A server over the small model, whose template shows tools."""
    engine = make_async(
        model=make_model(max_position_embeddings=2048),
        tokenizer=with_template(TEMPLATE),
        num_blocks=1024,
        max_num_batched_tokens=1024,
    )
    server = serve(engine)
    yield server.openai(), server
    check_empty(engine)


def check_forced(client: openai.OpenAI, choice: Any, **more: Any) -> None:
    """Every call keeps to its schema, and a stream has the same ones."""
    ask = ASK | {"tool_choice": choice, "n": 3, "seed": 5, "max_tokens": 400} | more
    whole = told(client.chat.completions.create(**ask))
    assert len(whole) == 3
    for content, calls, reason in whole.values():
        assert (content, reason) == (None, "tool_calls")
        assert calls
        for name, arguments in calls:
            assert jsonschema_rs.is_valid(SCHEMAS[name], json.loads(arguments))
            assert choice == "required" or name == "look"
    assert gathered(client.chat.completions.create(**ask, stream=True)) == whole


def test_a_forced_call_keeps_to_its_schema(calling: tuple[openai.OpenAI, Live]) -> None:
    client, _ = calling
    check_forced(client, CHOSEN)
    check_forced(client, "required", parallel_tool_calls=False)
    # A random model goes on with calls until its end: each of them is right.
    answer = client.chat.completions.create(**ASK, tool_choice="required", seed=1, max_tokens=300)
    calls = answer.choices[0].message.tool_calls or []
    assert len(calls) > 1
    assert len({call.id for call in calls}) == len(calls)
    whole = calls if answer.choices[0].finish_reason == "tool_calls" else calls[:-1]
    for call in whole:
        assert jsonschema_rs.is_valid(SCHEMAS[call.function.name], json.loads(call.function.arguments))


def test_a_forced_call_that_is_not_forced_is_caught(
    calling: tuple[openai.OpenAI, Live], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Planted: arguments of any kind."""
    client, _ = calling
    monkeypatch.setattr(tool_use, "arguments_grammar", lambda tool, place: 'start: %json {"type": "object"}')
    with pytest.raises((AssertionError, ValueError)):
        check_forced(client, CHOSEN)


def test_a_model_that_makes_no_call_just_answers(calling: tuple[openai.OpenAI, Live]) -> None:
    client, _ = calling
    ask = ASK | {"seed": 2, "max_tokens": 20}
    whole = told(client.chat.completions.create(**ask))
    [(content, calls, _)] = whole.values()
    assert content
    assert not calls
    assert gathered(client.chat.completions.create(**ask, stream=True)) == whole
    # Of all the tools the prompt knows nothing where none may be called.
    none, plain = (
        client.chat.completions.create(**ASK | change, max_tokens=1)
        for change in ({"tool_choice": "none"}, {"tools": openai.omit})
    )
    assert none.usage.prompt_tokens == plain.usage.prompt_tokens < 60


def check_chosen(serve: MakeServer, size: int) -> None:
    client = serve(Speaking(SAID, "Just so.", size=size)).openai()
    ask = ASK | {"n": 2, "tool_choice": "auto"}
    right = {
        0: ("Let me see.", [("look", '{"at": "sky", "far": 3}'), ("go", "{}")], "tool_calls"),
        1: ("Just so.", [], "stop"),
    }
    whole = client.chat.completions.create(**ask)
    assert told(whole) == right
    assert whole.choices[1].message.tool_calls is None
    assert gathered(client.chat.completions.create(**ask, stream=True)) == right


@pytest.mark.parametrize("size", [1, 2, 7, 1000])
def test_calls_that_the_model_chooses_are_read_out_of_its_text(size: int, serve: MakeServer) -> None:
    check_chosen(serve, size)


def test_answers_that_share_a_reader_or_have_no_end_are_caught(serve: MakeServer, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        own = tool_events.ToolEvents.__init__

        def shared(self: Any, generation: Any, readers: Any, **options: Any) -> None:
            own(self, generation, [readers[0]] * len(readers), **options)

        patch.setattr(tool_events.ToolEvents, "__init__", shared)
        with pytest.raises(AssertionError):
            check_chosen(serve, 3)
    with monkeypatch.context() as patch:
        patch.setattr(CallReader, "reason", lambda self, reason: reason)
        with pytest.raises(AssertionError):
            check_chosen(serve, 3)


def test_the_clients_own_gathering_of_a_stream_has_the_calls(serve: MakeServer) -> None:
    client = serve(Speaking(SAID)).openai()
    with client.chat.completions.stream(**ASK) as stream:
        done = [event for event in stream if event.type == "tool_calls.function.arguments.done"]
        answer = stream.get_final_completion()
    assert [(event.name, event.arguments) for event in done] == [("look", '{"at": "sky", "far": 3}'), ("go", "{}")]
    [choice] = answer.choices
    assert choice.message.tool_calls[0].function.parsed_arguments == {"at": "sky", "far": 3}  # type: ignore[union-attr,index]
    assert choice.finish_reason == "tool_calls"


def test_log_probabilities_and_the_usage_come_beside_calls(serve: MakeServer) -> None:
    server = serve(Speaking(SAID, size=5))
    num_tokens = -(-len(SAID) // 5)
    ask = ASK | {"logprobs": True}
    whole = server.openai().chat.completions.create(**ask)
    assert len(whole.choices[0].logprobs.content) == whole.usage.completion_tokens == num_tokens  # type: ignore[union-attr,arg-type]
    body = ask | {"stream": True, "stream_options": {"include_usage": True}}
    *pieces, usage, done = events(server.client().post("/v1/chat/completions", json=body).text)
    assert done == "[DONE]"
    assert usage["usage"]["completion_tokens"] == num_tokens
    counts = [len((piece["choices"][0]["logprobs"] or {"content": []})["content"]) for piece in pieces]
    assert counts == [0] + [1] * num_tokens  # the role, and each token where it came


def test_an_answer_that_was_cut_off_does_not_say_that_it_called(serve: MakeServer) -> None:
    server = serve(Speaking(SAID[:70], reason="length"))
    [choice] = server.openai().chat.completions.create(**ASK).choices
    assert choice.finish_reason == "length"
    assert choice.message.tool_calls[0].function.arguments == SAID[SAID.index('{"at"') : 70]  # type: ignore[union-attr,index]


def test_one_call_at_most_where_the_client_wants_no_more(serve: MakeServer) -> None:
    client = serve(Speaking(SAID)).openai()
    ask = ASK | {"parallel_tool_calls": False}
    for answers in (told(client.chat.completions.create(**ask)), gathered(client.chat.completions.create(**ask, stream=True))):
        assert answers == {0: ("Let me see.", [("look", '{"at": "sky", "far": 3}')], "tool_calls")}


def test_a_call_and_its_result_go_back_into_the_prompt(serve: MakeServer) -> None:
    engine = Speaking(SAID)
    server = serve(engine)
    client = server.openai()
    message = client.chat.completions.create(**ASK).choices[0].message
    assert message.tool_calls is not None
    results = [{"role": "tool", "tool_call_id": call.id, "content": "fine"} for call in message.tool_calls]
    client.chat.completions.create(**ASK | {"messages": [*MESSAGES, message.model_dump(), *results]})
    prompt = server.client().post("/detokenize", json={"tokens": engine.begun[-1].prompt_token_ids}).json()["prompt"]
    calls = '<tool_call>{"name": "look", "arguments": {"at": "sky", "far": 3}}</tool_call>'
    assert calls in prompt.replace('{"arguments": {"at": "sky", "far": 3}, "name": "look"}', calls[11:-12])
    assert prompt.endswith("<|start|>tool: fine<|start|>tool: fine<|start|>assistant:")
    assert '"name": "go"' in prompt.partition("Write")[0]


MISTRAL = "{% for tool in tools or [] %}{{ tool | tojson }}{% endfor %}[TOOL_CALLS]" + CHAT_TEMPLATE


def test_a_marker_that_is_a_special_token_stays_in_the_text(serve: MakeServer) -> None:
    said = '[TOOL_CALLS] [{"name": "go", "arguments": {}}]'
    for special in ((), ("[TOOL_CALLS]",)):
        engine = Speaking(said, tokenizer=with_template(MISTRAL, special))
        [choice] = serve(engine).openai().chat.completions.create(**ASK).choices
        assert choice.finish_reason == "tool_calls"
        assert len(choice.message.tool_calls[0].id) == 9  # type: ignore[union-attr,index]
        assert engine.begun[-1].sampling.get("skip_special_tokens", True) is not bool(special)


def refusal(server: Live, **change: Any) -> tuple[str, str]:
    answer = server.client().post("/v1/chat/completions", json=ASK | change)
    assert answer.status_code == 400
    return answer.json()["error"]["param"], answer.json()["error"]["message"]


UNKNOWN = "{% for tool in tools or [] %}{{ tool | tojson }}{% endfor %}" + CHAT_TEMPLATE


def test_who_writes_calls_in_an_unknown_way_is_asked_for_none_until_an_operator_says_which(serve: MakeServer) -> None:
    tokenizer = with_template(UNKNOWN)
    field, message = refusal(serve(Speaking(SAID, tokenizer=tokenizer)))
    assert field == "tools"
    assert "--tool-call-parser" in message
    named = serve(Speaking(SAID, tokenizer=tokenizer), tool_call_parser="hermes")
    assert named.openai().chat.completions.create(**ASK).choices[0].finish_reason == "tool_calls"
    off = serve(Speaking(SAID), has_auto_tool_choice=False)
    assert refusal(off)[0] == "tools"
    other = serve(Speaking(SAID), tool_call_parser="mistral")
    assert other.openai().chat.completions.create(**ASK).choices[0].message.content == SAID


def test_what_is_wrong_in_a_forced_schema_is_told(calling: tuple[openai.OpenAI, Live]) -> None:
    _, server = calling
    bad: Any = {"type": "function", "function": {"name": "x", "parameters": {"properties": {"a": {"type": "animal"}}}}}
    for choice in ("required", {"type": "function", "function": {"name": "x"}}):
        field, message = refusal(server, tools=[TOOLS[1], bad], tool_choice=choice)
        assert field == "tool_choice"
        assert "animal" in message
        assert "tool_arguments" not in message


def test_a_tool_that_is_offered_but_not_looked_for_is_caught(serve: MakeServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted: the text goes out as the model wrote it, as a server does that knows of no calls."""
    own = tool_use.ToolUse

    def blind(**said: Any) -> Any:
        return own(**said | {"make_reader": None})

    monkeypatch.setattr(tool_use, "ToolUse", blind)
    with pytest.raises(AssertionError):
        check_chosen(serve, 3)


@pytest.mark.parametrize("is_streamed", [False, True])
def test_a_long_text_is_read_beside_the_event_loop(
    is_streamed: bool, serve: MakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of an answer, or all that a slow reader missed of its stream."""
    threads = []
    own = CallReader.push

    def noted(reader: CallReader, text: str) -> Any:
        threads.append(threading.current_thread().name)
        return own(reader, text)

    monkeypatch.setattr(CallReader, "push", noted)
    for text in ("x" * 2000, "x"):
        answer = serve(Speaking(text, size=2000)).client().post("/v1/chat/completions", json=ASK | {"stream": is_streamed})
        assert text in answer.text
    assert [name.startswith("blocktable-readers") for name in threads] == [True, False]


@pytest.mark.parametrize("arguments", ['{"a"', "[]", '{"a": NaN}', '{"a": 1e999}', '{"a": "\\ud83d"}', '{"\\ud83d": 1}', "5"])
def test_arguments_that_no_prompt_can_hold_are_refused(arguments: str, serve: MakeServer) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "look", "arguments": arguments}}
    turns = [*MESSAGES, {"role": "assistant", "tool_calls": [call]}, {"role": "tool", "content": "fine"}]
    field, message = refusal(serve(Speaking("x")), messages=turns)
    assert field == "messages[1].tool_calls[0].function.arguments"
    assert "the JSON of an object" in message
