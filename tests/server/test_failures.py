"""Promise: whatever the engine refuses or suffers reaches the client as a status, or, once a stream has begun, as its last
event; the `openai` client raises what it should; nothing of the inside is told."""

import asyncio
import json
import logging
from collections.abc import AsyncGenerator
from typing import Any

import openai
import pytest

from blocktable.errors import (
    EngineDeadError,
    InvalidInputError,
    NeverFitsError,
    QueueFullError,
    ShutDownError,
)
from blocktable.server import errors as module
from blocktable.server.engine_client import EngineRequest, EngineState, Piece
from blocktable.server.tenants import Tenants

from .conftest import MakeServer
from .fake_engine import FakeEngine
from .live import events

ASK: dict[str, Any] = {"model": "tiny", "prompt": [1, 2, 3]}


def ending(error: Exception | Piece, after: int = 0) -> FakeEngine:
    """Says `after` pieces, and then this."""

    async def say(request: EngineRequest) -> AsyncGenerator[Piece, None]:
        for _ in range(after):
            yield Piece("x", [1], None, None, 0)
        await asyncio.sleep(0)
        if isinstance(error, Exception):
            raise error
        yield error

    return FakeEngine(say)


ENDS: dict[str, tuple[Exception | Piece, int, type[openai.APIStatusError], str, str | None]] = {
    "a full line": (QueueFullError(9, "max_waiting", 9, 2_300_000), 429, openai.RateLimitError, "queue_full", "3"),
    "a full line of a tenant": (QueueFullError(9, "tenant", 9, 1), 429, openai.RateLimitError, "queue_full", "1"),
    "a full line, nobody knows how long": (QueueFullError(9), 429, openai.RateLimitError, "queue_full", None),
    "too large for the pool": (NeverFitsError(9, 4), 400, openai.BadRequestError, "never_fits", None),
    "what only the engine can know": (
        InvalidInputError("priority", 1, "needs policy=priority"),
        400,
        openai.BadRequestError,
        "invalid_value",
        None,
    ),
    "an engine that died": (EngineDeadError("killed"), 503, openai.InternalServerError, "engine_dead", None),
    "a shutdown": (ShutDownError(), 503, openai.InternalServerError, "draining", "1"),
    "a step that failed": (Piece("", [], "error"), 500, openai.InternalServerError, "step_failed", None),
    "a queue deadline": (Piece("", [], "refused"), 429, openai.RateLimitError, "queue_deadline", None),
    "an abort by the server": (Piece("", [], "abort"), 503, openai.InternalServerError, "aborted", None),
}


@pytest.mark.parametrize("is_streamed", [False, True])
@pytest.mark.parametrize("name", ENDS)
def test_an_end_before_the_first_word_has_its_status(name: str, is_streamed: bool, serve: MakeServer) -> None:
    end, status, kind, code, retry_after = ENDS[name]
    client = serve(ending(end)).openai()
    with pytest.raises(kind) as caught:
        client.completions.create(**ASK, stream=is_streamed)
    assert (caught.value.status_code, caught.value.code) == (status, code)
    assert caught.value.response.headers.get("retry-after") == retry_after


@pytest.mark.parametrize("name", ENDS)
def test_an_end_behind_the_first_word_is_the_last_event(name: str, serve: MakeServer) -> None:
    end, _, _, code, _ = ENDS[name]
    server = serve(ending(end, after=2))
    said: list[str] = []
    with pytest.raises(openai.APIError) as caught:
        said.extend(piece.choices[0].text for piece in server.openai().completions.create(**ASK, stream=True))
    assert said == ["x", "x"]
    assert caught.value.code == code
    body = server.client().post("/v1/completions", json=ASK | {"stream": True}).text
    assert "error" in events(body)[-1], "no [DONE]: it did not end well"


@pytest.mark.parametrize("after", [0, 2])
def test_one_of_several_answers_that_fails_ends_the_others(after: int, serve: MakeServer) -> None:
    async def say(request: EngineRequest) -> AsyncGenerator[Piece, None]:
        if request.request_id.endswith("-1"):
            for _ in range(after):
                yield Piece("x", [1], None, None, 0)
            raise QueueFullError(9)
        while True:
            await asyncio.sleep(0.001)
            yield Piece("y", [1], None, None, 0)

    engine = FakeEngine(say)
    answer = serve(engine).client().post("/v1/completions", json=ASK | {"prompt": [[1], [2], [3]]})
    assert answer.status_code == 429
    assert len(engine.begun) == len(engine.ended) == 3


def test_a_fault_of_ours_is_a_plain_500_and_logged(serve: MakeServer) -> None:
    server = serve(ending(KeyError("/secret/path")))
    answer = server.client().post("/v1/completions", json=ASK)
    assert answer.status_code == 500
    assert answer.json()["error"]["code"] == "internal_error"
    assert "secret" not in answer.text
    assert "secret" in server.faults.records[0].getMessage()
    server.faults.records.clear()


@pytest.mark.parametrize(
    "state, code, retry_after",
    [
        (EngineState.STARTING, "engine_starting", "1"),
        (EngineState.DRAINING, "draining", "1"),
        (EngineState.DEAD, "engine_dead", None),
    ],
)
def test_an_engine_that_takes_nothing_in_is_told_before_it_is_asked(
    state: EngineState, code: str, retry_after: str | None, serve: MakeServer
) -> None:
    engine = FakeEngine()
    engine.state = state
    answer = serve(engine).client().post("/v1/completions", json=ASK)
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, code)
    assert answer.headers.get("retry-after") == retry_after
    assert engine.begun == []


def test_a_wrong_key_and_a_wrong_model_are_the_clients_own_exceptions(serve: MakeServer) -> None:
    server = serve(FakeEngine(), Tenants.of_keys([("tenant", "right")]))
    with pytest.raises(openai.AuthenticationError):
        server.openai("wrong").completions.create(**ASK)
    with pytest.raises(openai.NotFoundError) as caught:
        server.openai("right").completions.create(**ASK | {"model": "other"})
    assert caught.value.param == "model"
    with pytest.raises(openai.NotFoundError):
        server.openai("right").models.retrieve("other")


def test_without_a_tokenizer_ids_are_served_and_texts_refused(serve: MakeServer) -> None:
    client = serve(FakeEngine()).client()
    assert client.post("/v1/completions", json=ASK).json()["choices"][0]["text"] == "abc"
    for path, body in [
        ("/v1/completions", {"prompt": "x"}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]}),
    ]:
        answer = client.post(path, json=body)
        assert answer.status_code == 400
        assert "no tokenizer" in answer.json()["error"]["message"]


def test_every_error_of_the_family_has_an_answer(caplog: pytest.LogCaptureFixture) -> None:
    """Those that are nobody's input are faults of ours: 500, and in the log."""
    with caplog.at_level(logging.ERROR, "blocktable.server"):
        assert module.api_error(ValueError("x")).status == 500
    assert len(caplog.records) == 1
    for error in (end for end, *_ in ENDS.values() if isinstance(end, Exception)):
        told = module.api_error(error)
        assert 400 <= told.status <= 503
        assert json.loads(json.dumps(told.reply.error.message))
