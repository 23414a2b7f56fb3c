"""Promise: a request that is refused is counted once, under why, whoever refused it; nothing else is counted as refused. Each
check has a planted fault that it catches."""

from __future__ import annotations

import ast
import re
import socket
from collections import Counter
from collections.abc import AsyncGenerator, Callable
from pathlib import Path
from typing import Any

import pytest

import blocktable.server
from blocktable.errors import EngineDeadError, NeverFitsError, QueueFullError
from blocktable.server import http_protocol
from blocktable.server.engine_client import EngineRequest, EngineState, Piece
from blocktable.server.errors import ApiError
from blocktable.server.guard import Guard
from blocktable.server.limits import Limits
from blocktable.server.refusals import FAILURES, REFUSAL_OF, Refusal, Refusals
from blocktable.server.tenants import Tenants

from .fake_engine import FakeEngine
from .live import Live, live, open_request

PATH = "/v1/completions"
GOOD = {"prompt": [1], "max_tokens": 3}
KEYS = Tenants.of_keys([("acme", "right")])


def asks(change: dict[str, Any]) -> Callable[[Live, FakeEngine], object]:
    return lambda server, engine: server.client().post(PATH, json=GOOD | change)


def sends(content: bytes, kind: str = "application/json") -> Callable[[Live, FakeEngine], object]:
    return lambda server, engine: server.client().post(PATH, content=content, headers={"content-type": kind})


def meets(error: Exception) -> Callable[[Live, FakeEngine], object]:
    """What the engine refuses with."""

    async def say(request: EngineRequest) -> AsyncGenerator[Piece, None]:
        raise error
        yield  # a generator

    def ask(server: Live, engine: FakeEngine) -> object:
        engine.say = say
        return server.client().post(PATH, json=GOOD | {"stream": True})

    return ask


def says(*pieces: Piece | Exception) -> Callable[[Live, FakeEngine], object]:
    """A stream of what the engine says."""

    async def say(request: EngineRequest) -> AsyncGenerator[Piece, None]:
        for piece in pieces:
            if isinstance(piece, Exception):
                raise piece
            yield piece

    def ask(server: Live, engine: FakeEngine) -> object:
        engine.say = say
        return server.client().post(PATH, json=GOOD | {"stream": True})

    return ask


def drains(server: Live, engine: FakeEngine) -> None:
    engine.state = EngineState.DRAINING
    assert server.client().post(PATH, json=GOOD).status_code == 503


def stops_in_the_middle(server: Live, engine: FakeEngine) -> None:
    with open_request(server, PATH, GOOD, length=1000) as connection:
        assert b" 408 " in connection.recv(4096)


def says_no_http(server: Live, engine: FakeEngine) -> None:
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=30) as connection:
        connection.sendall(b"\x16\x03\x01 a client that speaks TLS\r\n\r\n")
        assert b" 400 " in connection.recv(4096)


def is_called_otherwise(server: Live, engine: FakeEngine) -> None:
    assert server.client().post(PATH, json=GOOD, headers={"host": "elsewhere"}).status_code == 403


CASES: dict[str, tuple[Refusal | None, Callable[[Live, FakeEngine], object]]] = {
    "no HTTP": (Refusal.NOT_HTTP, says_no_http),
    "another name": (Refusal.NO_KEY, is_called_otherwise),
    "no such path": (Refusal.NO_SUCH_ROUTE, lambda server, engine: server.client().get("/v1/nothing")),
    "another method": (Refusal.NO_SUCH_ROUTE, lambda server, engine: server.client().get(PATH)),
    "no such model": (Refusal.NO_SUCH_MODEL, asks({"model": "other"})),
    "no JSON": (Refusal.UNREADABLE_BODY, sends(b"{")),
    "another type": (Refusal.UNREADABLE_BODY, sends(b"{}", "text/plain")),
    "a large body": (Refusal.BODY_TOO_LARGE, sends(b" " * 5000)),
    "a body that does not come": (Refusal.BODY_TIMEOUT, stops_in_the_middle),
    "an unknown field": (Refusal.UNKNOWN_FIELD, asks({"max_token": 3})),
    "a feature that is not served": (Refusal.NOT_SERVED, asks({"echo": True})),
    "a bad value": (Refusal.INVALID_INPUT, asks({"max_tokens": 0})),
    "fields that disagree": (Refusal.INVALID_INPUT, asks({"min_tokens": 9})),
    "a long prompt": (Refusal.TOO_LONG, asks({"prompt": [1] * 300})),
    "larger than the pool": (Refusal.NEVER_FITS, meets(NeverFitsError(5, 4))),
    "a full line": (Refusal.QUEUE_FULL, meets(QueueFullError(8, "requests", 8))),
    "a line that is too slow": (Refusal.QUEUE_DEADLINE, says(Piece("", [], "refused"))),
    "a second prompt that is refused late": (Refusal.QUEUE_FULL, says(Piece("a", [1]), QueueFullError(8, "requests", 8))),
    "a server that drains": (Refusal.UNAVAILABLE, drains),
    "a dead engine": (Refusal.UNAVAILABLE, meets(EngineDeadError("killed"))),
    "an answer": (None, asks({})),
    "a step that fails": (None, says(Piece("", [], "error"))),
    "an engine that dies in the middle": (None, says(Piece("a", [1]), EngineDeadError("killed"))),
}


def check(case: str) -> None:
    """The case, alone, and what it added."""
    kind, act = CASES[case]
    refusals, engine = Refusals(), FakeEngine()
    limits = Limits(max_body_bytes=4096, body_timeout_s=0.3)
    with live(engine, limits=limits, names=("fake",), refusals=refusals) as server:
        before = Counter(refusals.counts)
        act(server, engine)
        assert refusals.counts - before == ({} if kind is None else {kind: 1}), case


def check_keys() -> None:
    """No key, a wrong one, a right one."""
    refusals = Refusals()
    with live(FakeEngine(), KEYS, refusals=refusals) as server:
        before = refusals.counts[Refusal.NO_KEY]
        for key in (None, "wrong", "right"):
            server.client(key).get("/v1/models")
        assert refusals.counts[Refusal.NO_KEY] - before == 2


@pytest.mark.parametrize("case", CASES)
def test_a_refusal_is_counted_once_under_why(case: str) -> None:
    check(case)


def test_who_has_no_key_is_counted() -> None:
    check_keys()


def test_each_kind_is_met_above() -> None:
    assert {kind for kind, _ in CASES.values()} == {None, *Refusal}


def test_every_code_of_an_answer_is_a_kind_or_a_failure() -> None:
    page = (Path(__file__).parents[2] / "docs" / "server.md").read_text(encoding="utf-8")
    told = {code for line in page.splitlines() if re.match(r"\| [45]\d\d", line) for code in re.findall(r"`([a-z_]+)`", line)}
    assert told == set(REFUSAL_OF) | FAILURES
    assert codes() == set(REFUSAL_OF) | FAILURES


def codes() -> set[str]:
    """Those that the sources name: `code` of an `ApiError`, the last argument of what makes one."""
    found: set[str] = set()
    for path in Path(str(blocktable.server.__file__)).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                if node.func.id in {"refused", "unavailable"} and len(node.args) == (3 if node.func.id == "refused" else 2):
                    found |= _texts(node.args[-1])
                for given in node.keywords if node.func.id == "ApiError" else ():
                    found |= _texts(given.value) if given.arg == "code" else set()
            if isinstance(node, ast.Assign) and [ast.unparse(one) for one in node.targets] == ["code"]:
                found |= _texts(node.value)
    return found | {"invalid_value"}  # what `refused` says by itself


def _texts(node: ast.expr) -> set[str]:
    parts = [node.body, node.orelse] if isinstance(node, ast.IfExp) else [node]
    return {part.value for part in parts if isinstance(part, ast.Constant) and isinstance(part.value, str)}


_note, _guard = Refusals.note, Guard.__init__


def _twice(refusals: Refusals, error: ApiError) -> None:
    _note(refusals, error)
    _note(refusals, error)


def _all_invalid(refusals: Refusals, error: ApiError) -> None:
    refusals.counts[Refusal.INVALID_INPUT] += 1


FAULTS: dict[str, tuple[Any, str, Any, Callable[[], None]]] = {
    "counted twice": (Refusals, "note", _twice, lambda: check("a bad value")),
    "all under one name": (Refusals, "note", _all_invalid, lambda: check("a long prompt")),
    "failures count too": (Refusals, "note", _all_invalid, lambda: check("a step that fails")),
    "not at all": (Refusals, "note", lambda refusals, error: None, lambda: check("a full line")),
    "uvicorn's own protocol": (http_protocol, "counting_protocol", lambda *given: "auto", lambda: check("no HTTP")),
    "a late one is lost": (
        Refusals,
        "note_later",
        lambda refusals, error: None,
        lambda: check("a second prompt that is refused late"),
    ),
    "a death counts": (Refusals, "note_later", _note, lambda: check("an engine that dies in the middle")),
    "the guard has its own books": (
        Guard,
        "__init__",
        lambda guard, app, tenants, open_paths, refusals: _guard(guard, app, tenants, open_paths),
        check_keys,
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_caught(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    where, name, planted, checked = FAULTS[fault]
    monkeypatch.setattr(where, name, planted)
    with pytest.raises(AssertionError):
        checked()
