"""Promise: whatever a client sends, it is refused with a status, a field and a reason, before anything is done for it; the
engine has the same blocks free as before, and answers the next request."""

import json
import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest

from blocktable import AsyncLLM
from blocktable.server import endpoint, reader
from blocktable.server.limits import Limits
from blocktable.server.protocol import not_served, reading
from blocktable.text.tokenizer import Tokenizer
from tests.engine.tiny_llama import MAX_MODEL_LEN, VOCAB_SIZE
from tests.engine.ways import check_empty

from .conftest import MakeServer
from .live import PATIENCE_S, Live

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
TURN = [{"role": "user", "content": "Hello"}]
L = MAX_MODEL_LEN

Row = tuple[str, dict[str, Any], int, str | None, str]
"""Path, what is changed of a good body, status, `param`, and a word of the message."""


def completion(change: dict[str, Any], param: str | None, word: str, status: int = 400) -> Row:
    return COMPLETIONS, {"prompt": "Hello", "max_tokens": 4} | change, status, param, word


def chat(change: dict[str, Any], param: str | None, word: str, status: int = 400) -> Row:
    return CHAT, {"messages": TURN, "max_tokens": 4} | change, status, param, word


def nested(depth: int) -> Any:
    value: Any = {}
    for _ in range(depth):
        value = {"items": value}
    return value


def tool(**changes: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "look", "parameters": {}} | changes}


TOOL = tool()
CHOSEN = {"type": "function", "function": {"name": "look"}}

ROWS: dict[str, Row] = {
    # 119: keys and values of a bias.
    **{
        f"a bias for {key!r}": completion({"logit_bias": {key: 1}}, "logit_bias", "matching regex")
        for key in ("-1", "AI", "1.5", "", "01", "1e2", "9" * 5000)
    },
    **{
        f"a bias for {key}": completion({"logit_bias": {"1": 1, str(key): 1}}, f"logit_bias[{key}]", f"0..{VOCAB_SIZE - 1}")
        for key in (VOCAB_SIZE, 2**31 - 1)
    },
    "a bias for 2**31": completion({"logit_bias": {str(2**31): 1}}, "logit_bias", f"0..{2**31 - 1}"),
    **{
        f"a bias of {value}": completion({"logit_bias": {"5": value}}, "logit_bias[...]", word)
        for value, word in [
            (1e9, "<= 100"),
            (-100.5, ">= -100"),
            (1e308, "<= 100"),
            ("1", "float"),
            (None, "null"),
            (True, "bool"),
        ]
    },
    "a bias that is a list": completion({"logit_bias": [1]}, "logit_bias", "object"),
    "1025 biases": completion({"logit_bias": {str(place): 1 for place in range(1025)}}, "logit_bias", "length <= 1024"),
    "a bias in a chat": chat({"logit_bias": {"-1": 1}}, "logit_bias", "matching regex"),
    # 121: whatever counts something.
    **{f"n of {n}": completion({"n": n}, "n", "int") for n in (0, -1, 129, 2**31, 2**63, 1e308, 1.5, "2", True)},
    **{f"best_of {n}": completion({"best_of": n}, "best_of", "int") for n in (0, 129, 2**31, 1e308, "x", True)},
    "best_of below n": completion({"best_of": 2, "n": 3}, "best_of", "at least n, which is 3"),
    "a stream of the best": completion({"best_of": 2, "stream": True}, "best_of", "not streamed"),
    "257 answers of which some are told": completion({"prompt": ["x"] * 3, "best_of": 86}, "best_of", "more than 256"),
    **{f"logprobs {n}": completion({"logprobs": n}, "logprobs", "0") for n in (-1, 21, 1025, 2**31, 2**63)},
    **{f"logprobs {n}": completion({"logprobs": n}, "logprobs", "int") for n in (1e308, True, "1", 0.5)},
    **{
        f"top_logprobs {n}": chat({"logprobs": True, "top_logprobs": n}, "top_logprobs", "0")
        for n in (-1, 21, 1025, 2**31, 2**63)
    },
    "top_logprobs False": chat({"logprobs": True, "top_logprobs": False}, "top_logprobs", "int"),
    "top_logprobs without logprobs": chat({"top_logprobs": 1}, "top_logprobs", "goes with logprobs"),
    "logprobs of a chat as a number": chat({"logprobs": 1}, "logprobs", "bool"),
    **{f"prompt_logprobs {n}": completion({"prompt_logprobs": n}, "prompt_logprobs", "0") for n in (-1, 21, 1025, 2**31)},
    **{f"prompt_logprobs {n}": chat({"prompt_logprobs": n}, "prompt_logprobs", "int") for n in (1e308, True, "1", 0.5)},
    "a stream with the prompt": completion({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs", "not streamed"),
    "no allowed token": completion({"allowed_token_ids": []}, "allowed_token_ids", "length >= 1"),
    "4097 allowed tokens": completion({"allowed_token_ids": [1] * 4097}, "allowed_token_ids", "length <= 4096"),
    "an allowed token outside": completion(
        {"allowed_token_ids": [1, VOCAB_SIZE]}, "allowed_token_ids[1]", f"0..{VOCAB_SIZE - 1}"
    ),
    "33 bad words": completion({"bad_words": ["x"] * 33}, "bad_words", "length <= 32"),
    "an empty bad word": completion({"bad_words": ["x", ""]}, "bad_words[1]", "length >= 1"),
    "a bad word of 257 characters": completion({"bad_words": ["x" * 257]}, "bad_words[0]", "length <= 256"),
    "nothing left to say": completion({"bad_words": ["e"], "allowed_token_ids": [68]}, "allowed_token_ids", "leave a token"),
    **{f"max_tokens {n}": completion({"max_tokens": n}, "max_tokens", "int") for n in (0, -1, 2**31, 2**63, 1e308)},
    **{f"min_tokens {n}": completion({"min_tokens": n}, "min_tokens", "int") for n in (-1, 2**31, 2**63, 1e308)},
    "33 stop strings": completion({"stop": ["x"] * 33}, "stop", "length <= 32"),
    "a stop string of 257 characters": completion({"stop": "x" * 257}, "stop", "length <= 256"),
    "an empty stop string": completion({"stop": ["x", ""]}, "stop[1]", "length >= 1"),
    "257 stop tokens": completion({"stop_token_ids": [1] * 257}, "stop_token_ids", "length <= 256"),
    "a stop token outside": completion({"stop_token_ids": [1, VOCAB_SIZE]}, "stop_token_ids[1]", f"0..{VOCAB_SIZE - 1}"),
    "129 prompts": completion({"prompt": ["x"] * 129}, "prompt", "at most 128"),
    "257 answers": completion({"prompt": ["x"] * 3, "n": 86}, "n", "more than 256"),
    # 122: free-form fields.
    "a format without its schema": chat({"response_format": {"type": "json_schema"}}, "response_format.json_schema", "missing"),
    "a format beside bad words": chat(
        {"response_format": {"type": "json_object"}, "bad_words": ["x"]}, "response_format", "goes without bad_words"
    ),
    "a format of no kind": chat({"response_format": {"type": "xml"}}, "response_format.type", "xml"),
    "a schema of no kind": chat(
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "animal"}}}},
        "response_format",
        "animal",
    ),
    "a schema of 300 levels": chat(
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": nested(300)}}},
        "response_format",
        "recursion limit",
    ),
    "a schema that is elsewhere": completion(
        {"structured_outputs": {"json": {"$ref": "file:///etc/passwd"}}}, "structured_outputs.json", "not present"
    ),
    "a schema that takes hours": completion(
        {"structured_outputs": {"json": {"type": "integer", "multipleOf": 99999989}}},
        "structured_outputs.json",
        "takes more than",
    ),
    "an expression that looks ahead": completion(
        {"structured_outputs": {"regex": "(?=a)b"}}, "structured_outputs.regex", "look"
    ),
    "an expression of 70,000 characters": completion(
        {"structured_outputs": {"regex": "a" * 70_000}}, "structured_outputs.regex", "length <= 65536"
    ),
    "two shapes": completion({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs", "exactly one"),
    "no shape": completion({"structured_outputs": {}}, "structured_outputs", "exactly one"),
    "a shape and a format": completion(
        {"structured_outputs": {"regex": "a"}, "response_format": {"type": "text"}},
        "structured_outputs",
        "without response_format",
    ),
    "1,025 choices": completion(
        {"structured_outputs": {"choice": ["a"] * 1025}}, "structured_outputs.choice", "length <= 1024"
    ),
    "a grammar of nothing": completion({"structured_outputs": {"grammar": "start: x"}}, "structured_outputs.grammar", "x"),
    "a structural tag": completion({"structured_outputs": {"structural_tag": "{}"}}, "structural_tag", "not served"),
    "a tool without a name": chat({"tools": [{"type": "function", "function": {}}]}, "tools[0].function.name", "missing"),
    "a tool of another type": chat({"tools": [TOOL | {"type": 5}]}, "tools[0].type", "str"),
    "parameters that are no object": chat(
        {"tools": [{"type": "function", "function": {"name": "x", "parameters": [1]}}]},
        "tools[0].function.parameters",
        "object",
    ),
    "129 tools": chat({"tools": [TOOL] * 129}, "tools", "length <= 128"),
    "tools of a model that writes calls in its own way": chat({"tools": [TOOL]}, "tools", "--tool-call-parser"),
    "tools without a place": chat({"tools": [TOOL], "tool_choice": "required"}, "tools", "no place"),
    "tools of 300 levels": chat({"tools": [tool(parameters=nested(300))], "tool_choice": CHOSEN}, "tools", "no place"),
    **{
        f"a tool called {name!r}": chat({"tools": [tool(name=name)]}, "tools[0].function.name", "matching regex")
        for name in ("", "a b", "a.b", "é", "x" * 65)
    },
    "two tools of one name": chat({"tools": [TOOL, TOOL]}, "tools[1].function.name", "another tool"),
    "tools of 300 KiB": chat({"tools": [tool(description="x" * 300_000)]}, "tools", "262144 bytes"),
    "forced tools of 70 KiB": chat(
        {"tools": [tool(parameters={"title": "x" * 70_000})], "tool_choice": "required"}, "tools", "65536 bytes"
    ),
    "a call without tools": chat({"tool_choice": "required"}, "tool_choice", "with tools only"),
    "a call of no tool": chat({"tools": [], "tool_choice": CHOSEN}, "tool_choice", "with tools only"),
    "a call of another tool": chat(
        {"tools": [tool(name="go")], "tool_choice": CHOSEN}, "tool_choice.function.name", "none of the tools"
    ),
    "a choice of no kind": chat({"tools": [TOOL], "tool_choice": "must"}, "tool_choice", "must"),
    "a choice of a type of its own": chat(
        {"tools": [TOOL], "tool_choice": {"type": "allowed_tools", "function": {"name": "look"}}},
        "tool_choice.type",
        "allowed_tools",
    ),
    "a choice without a name": chat(
        {"tools": [TOOL], "tool_choice": {"type": "function", "function": {}}}, "tool_choice.function.name", "missing"
    ),
    "calls side by side, perhaps": chat({"tools": [TOOL], "parallel_tool_calls": 2}, "parallel_tool_calls", "bool"),
    "a call that has a shape": chat(
        {"tools": [TOOL], "tool_choice": "required", "response_format": {"type": "json_object"}}, "tools", "tool_choice is none"
    ),
    "a call that is one of some texts": chat(
        {"tools": [TOOL], "structured_outputs": {"choice": ["a"]}}, "tools", "tool_choice is none"
    ),
    "a call beside bad words": chat(
        {"tools": [TOOL], "tool_choice": "required", "bad_words": ["x"]}, "tool_choice", "goes without bad_words"
    ),
    "forced arguments that are a text": chat(
        {"tools": [tool(parameters={"type": "string"})], "tool_choice": CHOSEN},
        "tools[0].function.parameters.type",
        "must be object",
    ),
    "a function of old": chat({"functions": [{"name": "look"}]}, "functions", "not served"),
    "a template's object": chat({"chat_template_kwargs": {"x": {}}}, "chat_template_kwargs[...]", "got object"),
    "a template's own name": chat(
        {"chat_template_kwargs": {"messages": 1}}, "chat_template_kwargs.messages", "not the client's"
    ),
    "a template's token": chat(
        {"chat_template_kwargs": {"bos_token": "x"}}, "chat_template_kwargs.bos_token", "not the client's"
    ),
    "a template of its own": chat({"chat_template": "{{ 1 }}"}, "chat_template", "not served"),
    # 125: the longest prompt.
    **{
        f"{L + more} tokens, max_tokens {count}": completion(
            {"prompt": [3] * (L + more)} | ({} if count is None else {"max_tokens": count}), "prompt", f"at most {L - 1} tokens"
        )
        for more in (0, 1, 1000)
        for count in (None, 1, 2)
    },
    "a text as long as the model": completion({"prompt": "x" * L}, "prompt", f"at most {L - 1} tokens"),
    "a text far too long": completion({"prompt": "x" * 100_000}, "prompt", "has 100000 characters"),
    "a chat too long": chat({"messages": [{"role": "user", "content": "x" * L}]}, "messages", f"at most {L - 1} tokens"),
    "the second of two too long": completion({"prompt": ["x", "x" * L]}, "prompt[1]", f"at most {L - 1} tokens"),
    # Numbers of sampling.
    "a temperature below zero": completion({"temperature": -0.1}, "temperature", ">= 0"),
    "a temperature beyond all": completion({"temperature": 1e308}, "temperature", "<= "),
    "a temperature as text": completion({"temperature": "1"}, "temperature", "float"),
    "no top_p": completion({"top_p": 0}, "top_p", "> 0"),
    "a top_p of 1.5": completion({"top_p": 1.5}, "top_p", "<= 1"),
    "a top_k of -2": completion({"top_k": -2}, "top_k", ">= -1"),
    "a min_p of 2": completion({"min_p": 2}, "min_p", "<= 1"),
    "a seed of 2**63": completion({"seed": 2**63}, "seed", "<="),
    "more than max_tokens at least": completion({"min_tokens": 5}, "min_tokens", "at most max_tokens, which is 4"),
    **{
        f"a {name} of {value}": completion({name: value}, name, "2")
        for name in ("presence_penalty", "frequency_penalty")
        for value in (-2.5, 2.5, 1e308)
    },
    "a penalty as text": chat({"presence_penalty": "1"}, "presence_penalty", "float"),
    "no repetition penalty": completion({"repetition_penalty": 0}, "repetition_penalty", ">= 0.01"),
    "a repetition penalty of 1e308": completion({"repetition_penalty": 1e308}, "repetition_penalty", "<= 100"),
    "a penalty of length": completion({"length_penalty": 0.5}, "length_penalty", "not served"),
    "an ignored answer": completion({"ignore_eos": "yes"}, "ignore_eos", "bool"),
    # How it is treated.
    "a priority without that policy": completion({"priority": 1}, "priority", ""),
    "a priority of 1001": completion({"priority": 1001}, "priority", "<= 1000"),
    "no time at all": completion({"deadline_s": 0}, "deadline_s", "> 0"),
    "endless time": completion({"queue_deadline_s": 1e10}, "queue_deadline_s", "<="),
    "an empty salt": completion({"cache_salt": ""}, "cache_salt", "length >= 1"),
    "a salt of 257 characters": completion({"cache_salt": "x" * 257}, "cache_salt", "length <= 256"),
    # Prompts.
    "no prompt": (COMPLETIONS, {"max_tokens": 4}, 400, "prompt", "missing"),
    "an empty prompt": completion({"prompt": ""}, "prompt", "length >= 1"),
    "no prompts": completion({"prompt": []}, "prompt", "length >= 1"),
    "an empty prompt among others": completion({"prompt": ["x", ""]}, "prompt[1]", "length >= 1"),
    "no ids": completion({"prompt": [[]]}, "prompt[0]", "length >= 1"),
    "a mixture": completion({"prompt": ["x", 1]}, "prompt", "a text, token ids, or a list"),
    "a prompt that is null": completion({"prompt": None}, "prompt", "got null"),
    "an object": completion({"prompt": {}}, "prompt", "got object"),
    "an id below zero": completion({"prompt": [1, -1]}, "prompt[1]", ">= 0"),
    "an id outside": completion({"prompt": [1, VOCAB_SIZE]}, "prompt[1]", f"0..{VOCAB_SIZE - 1}"),
    "an id outside, in a list": completion({"prompt": [[1], [2, VOCAB_SIZE]]}, "prompt[1][1]", f"0..{VOCAB_SIZE - 1}"),
    "an id that is a truth": completion({"prompt": [True]}, "prompt[0]", "got bool"),
    "an id of 2**63": completion({"prompt": [2**63]}, "prompt[0]", "<="),
    "an id that is a fraction": completion({"prompt": [1.5]}, "prompt[0]", "got float"),
    # Conversations.
    "no messages": chat({"messages": []}, "messages", "length >= 1"),
    "messages that are a text": chat({"messages": "Hello"}, "messages", "array"),
    "no role": chat({"messages": [{"content": "x"}]}, "messages[0].role", "missing"),
    "another role": chat({"messages": [*TURN, {"role": "king", "content": "x"}]}, "messages[1].role", "king"),
    "no content": chat({"messages": [{"role": "user"}]}, "messages[0].content", "tool_calls only"),
    "an unknown key of a message": chat(
        {"messages": [{"role": "user", "content": "x", "mood": 1}]}, "messages[0].mood", "unknown"
    ),
    "a picture": chat(
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
        "messages[0].content[0].type",
        "image_url",
    ),
    "arguments that are no JSON": chat(
        {"messages": [{"role": "assistant", "tool_calls": [{"id": "1", "function": {"name": "f", "arguments": "{"}}]}]},
        "messages[0].tool_calls[0].function.arguments",
        "JSON of an object",
    ),
    "two limits that differ": chat({"max_completion_tokens": 5}, "max_completion_tokens", "same as max_tokens, which says 4"),
    # Fields.
    "an unknown field": completion({"temprature": 0.5}, "temprature", "did you mean temperature"),
    "an unknown field of a chat": chat({"prompt": "x"}, "prompt", "unknown field"),
    "a tenant in the body": completion({"tenant": "other"}, "tenant", "unknown field"),
    "options of no stream": completion({"stream_options": {"include_usage": True}}, "stream_options", "stream=true"),
    "unknown options of a stream": completion({"stream": True, "stream_options": {"x": 1}}, "stream_options.x", "unknown"),
    "usage all the time": completion(
        {"stream": True, "stream_options": {"continuous_usage_stats": True}}, "continuous_usage_stats", "not served"
    ),
    "another model": completion({"model": "gpt-9"}, "model", "is not served here, but tiny", 404),
    # Other routes.
    "embeddings": ("/v1/embeddings", {"input": "x"}, 400, "input", "not served yet"),
    "embeddings of nothing": ("/v1/embeddings", {"input": ""}, 400, "input", "length >= 1"),
    "two things to tokenize": ("/tokenize", {"prompt": "x", "messages": TURN}, 400, "prompt", "and not both"),
    "nothing to tokenize": ("/tokenize", {}, 400, "prompt", "either"),
    "ids outside to spell": ("/detokenize", {"tokens": [VOCAB_SIZE]}, 400, "tokens[0]", f"0..{VOCAB_SIZE - 1}"),
    "no tokens": ("/detokenize", {}, 400, "tokens", "missing"),
}


@pytest.fixture(scope="module")
def shared(tiny_model: Any, tiny_tokenizer: Any) -> Iterator[tuple[Live, AsyncLLM]]:
    """One server for all rows: none may leave anything behind."""
    from blocktable.server.in_process import InProcessEngine

    from .live import live

    engine = AsyncLLM(
        tiny_model, tokenizer=tiny_tokenizer, self_check=False, num_blocks=64, block_size=8, max_num_seqs=8, num_threads=1
    )
    with live(InProcessEngine(engine)) as server:
        yield server, engine
    assert engine.shutdown(timeout_s=60)


def state_of(engine: AsyncLLM) -> dict[str, Any]:
    """What a refused request must not change."""
    stats = engine.scheduler.stats()
    return {name: stats[name] for name in ("submitted", "free_blocks", "used_blocks", "running", "waiting")}


def refused_as(answer: httpx.Response, status: int, param: str | None, word: str) -> None:
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert error["param"] == param, error
    assert word in error["message"], error["message"]
    assert len(error["message"]) < 700, "a value was shown whole"


def goes_on(server: Live) -> None:
    answer = server.client().post(COMPLETIONS, json={"prompt": "Hello", "max_tokens": 3, "ignore_eos": True})
    assert answer.status_code == 200, answer.text
    assert answer.json()["usage"]["completion_tokens"] == 3


@pytest.mark.parametrize("name", ROWS)
def test_bad_input_is_refused_by_its_field_and_changes_nothing(name: str, shared: tuple[Live, AsyncLLM]) -> None:
    server, engine = shared
    path, body, status, param, word = ROWS[name]
    before = state_of(engine)
    refused_as(server.client().post(path, json=body), status, param, word)
    assert state_of(engine) == before
    engine.scheduler.audit()


BODIES: dict[str, tuple[bytes, dict[str, str], int, str]] = {
    "nothing": (b"", {}, 400, "not JSON"),
    "half of it": (b'{"prompt": "x"', {}, 400, "not JSON"),
    "a list": (b"[]", {}, 400, "must be object"),
    "no number": (b'{"prompt": "x", "temperature": NaN}', {}, 400, "not JSON"),
    "endless": (b'{"prompt": "x", "logit_bias": {"5": Infinity}}', {}, 400, "not JSON"),
    "no Unicode": (b'{"prompt": "\xff"}', {}, 400, "not JSON"),
    "half a character": (b'{"prompt": "\\ud800"}', {}, 400, "not JSON"),
    "60,000 levels": (
        b'{"prompt": "x", "structured_outputs": {"json": {"enum": ' + b"[" * 60_000 + b"]" * 60_000 + b"}}}",
        {},
        400,
        "nested too deeply",
    ),
    "10,000 levels of parameters": (
        b'{"prompt": "x", "structured_outputs": {"json": ' + b'{"items":' * 10_000 + b"1" + b"}" * 10_000 + b"}}",
        {},
        400,
        "nested too deeply",
    ),
    "980 levels in a long body, which is read on a thread": (
        b'{"prompt": "x", "structured_outputs": {"json": {"a": ' + b"[" * 980 + b"]" * 980 + b"}}}" + b" " * 2**16,
        {},
        400,
        "nested too deeply",
    ),
    "a number of 5,000 digits": (b'{"prompt": "x", "seed": ' + b"1" * 5000 + b"}", {}, 400, "out of range"),
    "5 MB of an expression": (
        b'{"prompt": "x", "structured_outputs": {"regex": "' + b"(a+)+" * 2**20 + b'"}}',
        {},
        400,
        "length <= 65536",
    ),
    "a million lists": (b'{"prompt": "x", "user": [' + b"[]," * 2**20 + b"[]]}", {}, 400, "more than 65536 lists and objects"),
    "a million objects behind a quotation mark": (
        b'{"prompt": "\\\\", "tools": [' + b'{"\\"[":1},' * 2**19 + b"{}]}",
        {},
        400,
        "more than 65536 lists and objects",
    ),
    "a string of a million quotation marks without an end": (b'{"prompt": "' + b'[\\"' * 2**20, {}, 400, "not JSON"),
    "another type": (b'{"prompt": "x"}', {"content-type": "text/plain"}, 415, "application/json"),
    "no type": (b'{"prompt": "x"}', {"content-type": ""}, 415, "left out"),
    "packed": (b'{"prompt": "x"}', {"content-encoding": "gzip"}, 415, "content-encoding"),
    "too large": (b'{"prompt": "' + b"x" * 16 * 2**20 + b'"}', {}, 413, "larger than"),
}


class SlowBodies:
    """A decoder that begins a long body only when others were answered; that they are not, it sees after five seconds."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.began, self.goes_on = threading.Event(), threading.Event()
        self.others_waited = False
        decode = reading._decode

        def slowly(body: bytes, kind: Any) -> Any:
            if len(body) > 100_000:
                self.began.set()
                self.others_waited = not self.goes_on.wait(5)
            return decode(body, kind)

        monkeypatch.setattr(reading, "_decode", slowly)

    def others_are_answered(self, server: Live) -> None:
        """While a body of half a megabyte is read."""
        told: list[httpx.Response] = []
        ask = {"prompt": "x" * 500_000}
        thread = threading.Thread(target=lambda: told.append(server.client().post(COMPLETIONS, json=ask)))
        thread.start()
        assert self.began.wait(PATIENCE_S)
        for _ in range(5):
            assert server.client().get("/version").status_code == 200
        self.goes_on.set()
        thread.join()
        refused_as(told[0], 400, "prompt", "characters")
        assert not self.others_waited, "others waited for it"


@pytest.mark.parametrize("name", BODIES)
def test_a_body_that_cannot_be_read_is_refused_and_changes_nothing(name: str, shared: tuple[Live, AsyncLLM]) -> None:
    server, engine = shared
    content, headers, status, word = BODIES[name]
    before = state_of(engine)
    answer = server.client().post(COMPLETIONS, content=content, headers={"content-type": "application/json"} | headers)
    error = answer.json()["error"]
    assert answer.status_code == status, error
    assert word in error["message"]
    assert state_of(engine) == before
    goes_on(server)


def test_brackets_of_a_text_are_no_lists(shared: tuple[Live, AsyncLLM]) -> None:
    server, _ = shared
    body = {"prompt": 'x[{"' * 2**16}
    refused_as(server.client().post(COMPLETIONS, json=body), 400, "prompt", "characters")


def test_a_bound_on_lists_that_is_left_out_is_caught(shared: tuple[Live, AsyncLLM], monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted: any number of them is decoded."""
    monkeypatch.setattr(reading, "MOST_STRUCTURES", 2**30)
    with pytest.raises(AssertionError):
        test_a_body_that_cannot_be_read_is_refused_and_changes_nothing("a million lists", shared)


def test_a_bound_on_levels_that_is_left_out_is_caught(shared: tuple[Live, AsyncLLM], monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted: what one thread can decode, another cannot encode."""
    monkeypatch.setattr(reading, "MOST_LEVELS", 2**30)
    name = "980 levels in a long body, which is read on a thread"
    with pytest.raises(AssertionError):
        test_a_body_that_cannot_be_read_is_refused_and_changes_nothing(name, shared)
    shared[0].faults.records.clear()


@pytest.fixture
def slow_bodies(monkeypatch: pytest.MonkeyPatch) -> SlowBodies:
    return SlowBodies(monkeypatch)


def test_a_long_body_does_not_hold_up_others(slow_bodies: SlowBodies, server: Live) -> None:
    slow_bodies.others_are_answered(server)


def test_a_long_body_read_on_the_event_loop_is_caught(
    slow_bodies: SlowBodies, server: Live, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Planted: every body is taken for a short one."""
    monkeypatch.setattr(endpoint, "LONG_BODY_BYTES", 2**30)
    with pytest.raises(AssertionError, match="others waited"):
        slow_bodies.others_are_answered(server)


def test_a_body_without_a_length_is_bounded_too(shared: tuple[Live, AsyncLLM]) -> None:
    server, _ = shared
    pieces = (b"x" * 2**20 for _ in range(20))
    answer = server.client().post(COMPLETIONS, content=pieces, headers={"content-type": "application/json"})
    refused_as(answer, 413, None, "larger than")


@pytest.mark.parametrize("length", [L - 2, L - 1])
@pytest.mark.parametrize("max_tokens", [None, 1, 2])
def test_a_prompt_may_be_one_token_shorter_than_the_model(
    length: int, max_tokens: int | None, shared: tuple[Live, AsyncLLM]
) -> None:
    """One rule at every door: an answer is as long as there is room, and one token always has room."""
    server, _ = shared
    body = {"prompt": [3] * length, "ignore_eos": True} | ({} if max_tokens is None else {"max_tokens": max_tokens})
    answer = server.client().post(COMPLETIONS, json=body).json()
    assert answer["choices"][0]["finish_reason"] == "length"
    assert answer["usage"]["completion_tokens"] == min(max_tokens or 16, L - length)


def test_limits_are_still_inside(shared: tuple[Live, AsyncLLM]) -> None:
    server, engine = shared
    one = {"prompt": "x", "max_tokens": 1, "ignore_eos": True}
    for change, num_answers in [
        ({"n": 128}, 128),
        ({"n": 2, "best_of": 128}, 2),
        ({"prompt": ["x"] * 128, "n": 2}, 256),
        ({"stop": ["x" * 256] * 32}, 1),
        ({"max_tokens": 2**31 - 1, "deadline_s": 0.1}, 1),
        ({"stop_token_ids": [VOCAB_SIZE - 1] * 256}, 1),
        ({"logit_bias": {}, "frequency_penalty": 0, "best_of": 1, "n": 1, "echo": False, "suffix": ""}, 1),
        ({"logit_bias": {str(place): -100 for place in range(VOCAB_SIZE)}, "logprobs": 20}, 1),
        ({"allowed_token_ids": [VOCAB_SIZE - 1] * 4096, "bad_words": ["x" * 256] * 32, "presence_penalty": -2}, 1),
    ]:
        answer = server.client().post(COMPLETIONS, json=one | change)
        assert answer.status_code == 200, (change, answer.text)
        assert [choice["index"] for choice in answer.json()["choices"]] == list(range(num_answers))
    check_empty(engine)


def test_a_prompt_that_the_pool_never_holds_is_refused_with_the_numbers(
    make_async: Callable[..., AsyncLLM], serve: MakeServer
) -> None:
    server = serve(make_async(num_blocks=5))  # four usable blocks of eight
    refused_as(server.client().post(COMPLETIONS, json={"prompt": [3] * 33}), 400, "prompt", "needs 5 KV blocks, the pool has 4")


def test_a_good_request_beside_bad_ones_gets_its_cold_answer(shared: tuple[Live, AsyncLLM]) -> None:
    server, _ = shared
    good = {"prompt": "Once upon a time", "max_tokens": 60, "temperature": 0, "ignore_eos": True}
    cold = server.client().post(COMPLETIONS, json=good).json()["choices"][0]["text"]
    client = server.client()
    with client.stream("POST", COMPLETIONS, json=good | {"stream": True}) as stream:
        lines = stream.iter_lines()
        text = json.loads(next(lines).removeprefix("data: "))["choices"][0]["text"]
        for path, body, status, _, _ in list(ROWS.values())[:30]:
            assert server.client().post(path, json=body).status_code == status
        for line in lines:
            if line.startswith("data: {"):
                text += json.loads(line.removeprefix("data: "))["choices"][0]["text"]
    assert text == cold


class SlowReading:
    """A tokenizer that begins a long text only when others were answered; that they are not, it sees after five seconds."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.began, self.goes_on = threading.Event(), threading.Event()
        self.others_waited = False
        encode = Tokenizer.encode

        def slowly(tokenizer: Tokenizer, text: str, **options: Any) -> Any:
            if len(text) > 10_000:
                self.began.set()
                self.others_waited = not self.goes_on.wait(5)
            return encode(tokenizer, text, **options)

        monkeypatch.setattr(Tokenizer, "encode", slowly)
        # For servers that are made after it, each reads its tokenizer at the start: or the text is refused by its characters.
        monkeypatch.setattr(Tokenizer, "longest_token", property(lambda tokenizer: 2**27))


@pytest.fixture
def slow_reading(monkeypatch: pytest.MonkeyPatch) -> SlowReading:
    return SlowReading(monkeypatch)


def others_are_answered(server: Live, reading: SlowReading) -> None:
    """While a prompt of half a megabyte is read."""
    told: list[httpx.Response] = []
    ask = {"prompt": "Once upon a time. " * 30_000}
    thread = threading.Thread(target=lambda: told.append(server.client().post(COMPLETIONS, json=ask)))
    thread.start()
    assert reading.began.wait(PATIENCE_S)
    for _ in range(5):
        assert server.client().get("/version").status_code == 200
    reading.goes_on.set()
    thread.join()
    refused_as(told[0], 400, "prompt", "540000 tokens")
    assert not reading.others_waited, "others waited for it"


def test_a_huge_prompt_does_not_hold_up_others(slow_reading: SlowReading, server: Live) -> None:
    others_are_answered(server, slow_reading)


def test_a_prompt_read_on_the_event_loop_is_caught(
    slow_reading: SlowReading, server: Live, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Planted: every prompt is taken for a short one."""
    monkeypatch.setattr(reader, "LONG_TEXT", 2**30)
    with pytest.raises(AssertionError, match="others waited"):
        others_are_answered(server, slow_reading)


def test_a_body_that_does_not_come_is_given_up(engine: AsyncLLM, serve: MakeServer) -> None:
    server = serve(engine, limits=Limits(body_timeout_s=0.1))
    with socket.create_connection(("127.0.0.1", int(server.url.rsplit(":", 1)[1]))) as connection:
        head = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\nContent-Length: 50\r\n\r\n"
        connection.sendall(head.encode() + b'{"prompt"')
        assert connection.recv(4096).startswith(b"HTTP/1.1 408")


@pytest.mark.parametrize(
    "method, path, status",
    [("GET", "/v1/completions", 405), ("POST", "/v1/models", 405), ("GET", "/nowhere", 404), ("POST", "/v1/completions/", 404)],
)
def test_a_wrong_path_or_method_is_told_in_the_same_shape(
    method: str, path: str, status: int, shared: tuple[Live, AsyncLLM]
) -> None:
    answer = shared[0].client().request(method, path)
    assert answer.status_code == status
    assert answer.json()["error"]["code"] == "no_such_route"
    assert ("allow" in answer.headers) is (status == 405)


def test_an_unknown_field_that_is_ignored_is_caught(shared: tuple[Live, AsyncLLM], monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted: bodies are read without looking at what is left over, as many servers do."""
    import msgspec

    def loose(body: bytes, kind: Any) -> Any:
        known = {field.name for field in msgspec.structs.fields(kind)}
        return msgspec.convert({name: one for name, one in msgspec.json.decode(body).items() if name in known}, kind)

    monkeypatch.setattr(reading, "_decode", loose)
    with pytest.raises(AssertionError):
        test_bad_input_is_refused_by_its_field_and_changes_nothing("an unknown field", shared)


def test_a_feature_that_is_ignored_is_caught(shared: tuple[Live, AsyncLLM], monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted: what is not served yet is let through."""
    monkeypatch.setattr(not_served, "_is_same", lambda value, off: True)
    with pytest.raises(AssertionError):
        test_bad_input_is_refused_by_its_field_and_changes_nothing("a penalty of length", shared)


def test_a_bound_left_out_is_caught(engine: AsyncLLM, serve: MakeServer) -> None:
    """Planted: nobody counts prompts times n."""
    server = serve(engine, limits=Limits(max_answers=10**9))
    with pytest.raises(AssertionError):
        test_bad_input_is_refused_by_its_field_and_changes_nothing("257 answers", (server, engine))
