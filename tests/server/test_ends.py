"""Promise: an answer ends exactly once, with the table's reason, streamed or not, and with the same usage; its pieces together
are its text."""

import json
from collections.abc import AsyncGenerator, Callable
from typing import Any

import pytest

from blocktable import AsyncLLM
from blocktable.errors import EngineDeadError
from blocktable.server import sse
from blocktable.server.engine_client import EngineRequest, Piece
from blocktable.server.generation import Generation
from blocktable.server.limits import Limits
from tests.engine.tiny_llama import MAX_MODEL_LEN
from tests.text.samples import every_block

from .conftest import MakeServer
from .fake_engine import FakeEngine
from .live import Live, events, live, open_request
from .test_leaving import slow_model

PROMPT = "Once upon a time"


@pytest.fixture(scope="module")
def shared(tiny_model: Any, tiny_tokenizer: Any) -> Any:
    """One server for all that only reads text."""
    from blocktable.server.in_process import InProcessEngine

    engine = AsyncLLM(tiny_model, tokenizer=tiny_tokenizer, self_check=False, num_blocks=256, block_size=8, num_threads=1)
    with live(InProcessEngine(engine)) as server:
        yield server
    assert engine.shutdown(timeout_s=60)


def whole(server: Live, ask: dict[str, Any]) -> tuple[str, Any, Any, Any]:
    """Text, finish reason, stop reason, usage."""
    answer = server.client().post("/v1/completions", json=ask).json()
    [choice] = answer["choices"]
    return choice["text"], choice["finish_reason"], choice["stop_reason"], answer["usage"]


def streamed(server: Live, ask: dict[str, Any]) -> tuple[str, Any, Any, Any]:
    """The same, of a stream; its last piece alone has an end."""
    ask = ask | {"stream": True, "stream_options": {"include_usage": True}}
    *pieces, usage, done = events(server.client().post("/v1/completions", json=ask).text)
    assert done == "[DONE]"
    choices = [piece["choices"][0] for piece in pieces]
    assert all(choice["finish_reason"] is None for choice in choices[:-1])
    text = "".join(choice["text"] for choice in choices)
    return text, choices[-1]["finish_reason"], choices[-1]["stop_reason"], usage["usage"]


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("chat", [False, True])
def test_the_end_of_a_stream_goes_along_with_its_last_text(shared: Live, chat: bool, n: int) -> None:
    """One write, not three: text, usage and the last word."""
    prompt = {"messages": [{"role": "user", "content": "Hello"}]} if chat else {"prompt": PROMPT}
    ask = prompt | {"max_tokens": 5, "ignore_eos": True, "n": n, "stream": True, "stream_options": {"include_usage": True}}
    path = "/v1/chat/completions" if chat else "/v1/completions"
    with open_request(shared, path, ask) as connection, connection.makefile("rb") as lines:
        while lines.readline() != b"\r\n":
            pass
        chunks = []
        while size := int(lines.readline(), 16):
            chunks.append(lines.read(size))
            lines.readline()
    assert [b"[DONE]" in chunk for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
    assert b'"finish_reason":"length"' in chunks[-1]
    assert b'"completion_tokens":%d' % (5 * n) in chunks[-1]
    assert b"".join(chunks).count(b'"finish_reason":"length"') == n


def test_an_end_that_goes_alone_is_caught(shared: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Generation, "is_over", property(lambda generation: False))
    with pytest.raises(AssertionError):
        test_the_end_of_a_stream_goes_along_with_its_last_text(shared, False, 1)


def greedy(**said: Any) -> dict[str, Any]:
    return {"prompt": PROMPT, "temperature": 0, "max_tokens": 40} | said


def test_each_cause_has_its_reason_streamed_or_not(shared: Live) -> None:
    text = whole(shared, greedy())[0]
    stop = next(text[place : place + 2] for place in range(5, 38) if text[place : place + 2].isascii())
    [stop_id] = shared.client().post("/tokenize", json={"prompt": stop[0]}).json()["tokens"]
    causes: list[tuple[dict[str, Any], str, Any]] = [
        (greedy(), "length", None),
        (greedy(stop=["never to be seen", stop]), "stop", stop),
        (greedy(stop_token_ids=[stop_id]), "stop", stop_id),
        (greedy(prompt=[3] * (MAX_MODEL_LEN - 4), ignore_eos=True), "length", None),
    ]
    for ask, reason, stop_reason in causes:
        told = whole(shared, ask)
        assert told[1:3] == (reason, stop_reason), ask
        again = streamed(shared, ask)
        assert again[:3] == told[:3]
        assert again[3]["completion_tokens"] == told[3]["completion_tokens"]
    assert whole(shared, causes[1][0])[0] == text[: text.index(stop)]


def test_the_models_own_end_is_a_stop_without_more(make_async: Callable[..., AsyncLLM], serve: MakeServer) -> None:
    from tests.engine.faults import changing, faulty_model
    from tests.engine.tiny_llama import END_ID

    def ends(plan: Any, logits: Any) -> None:
        logits[:, END_ID] = 1e4

    engine = make_async()
    server = serve(engine)
    with faulty_model(engine, changing(ends)):
        for read in (whole, streamed):
            text, reason, stop_reason, usage = read(server, greedy())
            assert (text, reason, stop_reason, usage["completion_tokens"]) == ("", "stop", None, 1)


@pytest.mark.parametrize("read", [whole, streamed])
def test_a_deadline_ends_an_answer_where_it_is(read: Any, engine: AsyncLLM, serve: MakeServer) -> None:
    server = serve(engine)
    with slow_model(engine):
        _, reason, stop_reason, usage = read(server, greedy(max_tokens=200, ignore_eos=True, deadline_s=1.0))
    assert (reason, stop_reason) == ("abort", "deadline")
    assert 0 < usage["completion_tokens"] < 100


def test_the_servers_own_limit_is_a_deadline(engine: AsyncLLM, serve: MakeServer) -> None:
    server = serve(engine, limits=Limits(max_request_s=0.3))
    with slow_model(engine):
        assert whole(server, greedy(max_tokens=200, ignore_eos=True, deadline_s=100))[1:3] == ("abort", "deadline")


def test_any_unicode_streams_whole_and_only_grows(shared: Live) -> None:
    """Random bytes of the model, and every script of the prompt: pieces are whole characters, and add up to the text."""
    for seed, prompt in enumerate(every_block(step=4001)):
        ask = {"prompt": prompt[:40], "max_tokens": 40, "seed": seed, "ignore_eos": True}
        assert streamed(shared, ask)[0] == whole(shared, ask)[0]


def test_a_stop_string_never_leaks_a_part_of_itself(shared: Live) -> None:
    text = whole(shared, greedy(max_tokens=60))[0]
    for place in range(3, 40, 4):
        stop = text[place : place + 3]
        if "\ufffd" in stop or not stop:
            continue
        said = ""
        body = shared.client().post("/v1/completions", json=greedy(max_tokens=60, stop=stop, stream=True)).text
        for event in events(body)[:-1]:
            said += event["choices"][0]["text"]
            assert text.startswith(said)
        assert said == text[: text.index(stop)]


def test_an_event_is_json_whatever_the_text_and_the_name_hold(serve: MakeServer) -> None:
    from blocktable.server.engine_client import Piece

    from .fake_engine import FakeEngine

    odd = 'line\nend "quoted" \\ \u2028 \x00 data: [DONE]\r\n\r\n 🇮🇸'

    async def say(request: Any) -> Any:
        yield Piece(odd, [1], None, None, 0)
        yield Piece("", [1], "stop", odd, 0)

    server = serve(FakeEngine(say), names=(odd,))
    first, last, done = events(server.client().post("/v1/completions", json={"prompt": [1], "stream": True}).text)
    assert first["choices"][0]["text"] == odd
    assert first["model"] == odd
    assert last["choices"][0]["stop_reason"] == odd
    assert done == "[DONE]"
    assert json.dumps(first)


def check_last_write(engine: FakeEngine, last: bytes) -> None:
    """What the server is given to write at the end of a stream: the last event and the end of the body in one."""
    sent: list[Any] = []

    def noting(app: Any) -> Any:
        async def noted(scope: Any, receive: Any, send: Any) -> None:
            async def note(message: Any) -> None:
                sent.append(message)
                await send(message)

            await app(scope, receive, note)

        return noted

    with live(engine, names=("fake",), wrap=noting) as server:
        del sent[:]
        answer = server.client().post("/v1/completions", json={"prompt": [1], "max_tokens": 3, "stream": True})
        assert answer.content.endswith(last)
    bodies = [(message["body"].endswith(last), message["more_body"]) for message in sent if "body" in message]
    assert bodies == [(False, True)] * (len(bodies) - 1) + [(True, False)]


async def fails_late(request: EngineRequest) -> AsyncGenerator[Piece, None]:
    yield Piece("a", [1])
    raise EngineDeadError("killed")


def test_the_end_of_a_body_goes_along_with_the_last_event() -> None:
    check_last_write(FakeEngine(), b"data: [DONE]\n\n")
    check_last_write(FakeEngine(fails_late), b'"code":"engine_dead"}}\n\n')


def test_a_last_event_that_is_not_known_as_the_last_is_caught(shared: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    async def forgetful(events: sse.Events) -> AsyncGenerator[bytes, None]:
        async for event in sse.Events.stream(events):
            yield bytes(event)

    monkeypatch.setattr(sse.CompletionEvents, "stream", forgetful)
    with pytest.raises(AssertionError):
        check_last_write(FakeEngine(), b"data: [DONE]\n\n")
    shared.faults.records.clear()  # it hears of all servers in this process
