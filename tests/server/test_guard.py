"""Promise: without a known key nothing is reached but what was named open; a tenant comes from the key and nothing else; no key
is kept; without keys only this machine is served."""

import ast
import asyncio
import hmac
import inspect
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import httpx
import pytest
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.routing import Route

from blocktable import AsyncLLM
from blocktable.errors import InvalidInputError
from blocktable.server import guard, tenants
from blocktable.server.admin import make_admin_app
from blocktable.server.app import OPERATIONS, make_app
from blocktable.server.metrics import Metrics
from blocktable.server.options import ServeOptions
from blocktable.server.serve_app import ServeApp
from blocktable.server.serving import Serving
from blocktable.server.tenants import Tenants, new_key

from .conftest import MakeServer
from .fake_engine import FakeEngine
from .live import Live, open_request

ASK = {"prompt": [1, 2, 3]}


async def alive(request: Request) -> PlainTextResponse:
    return PlainTextResponse("alive")


HEALTH = [Route("/livez", alive)]

PATHS = [(one.method, one.path.replace("{id:path}", "x")) for one in OPERATIONS]
PATHS += [
    ("GET", "/openapi.json"),
    ("GET", "/nowhere"),
    ("POST", "/livez/x"),
    ("GET", "//livez"),
    ("GET", "/livez/../v1/models"),
]
PATHS += [("DELETE", "/v1/completions"), ("OPTIONS", "/v1/completions"), ("GET", "/%6civez/"), ("GET", "/docs")]

BAD_HEADERS = {
    "none": {},
    "another key": {"authorization": "Bearer wrong"},
    "no key": {"authorization": "Bearer"},
    "another kind": {"authorization": "Basic right"},
    "only the key": {"authorization": "right"},
    "the key's hash": {"authorization": f"Bearer {tenants.digest_of('right').hex()}"},
    "a part of the key": {"authorization": "Bearer righ"},
    "more than the key": {"authorization": "Bearer right right"},
    "in another header": {"x-api-key": "right"},
    "not ASCII": {"authorization": b"Bearer \xff\xfe"},
}


def everything_is_guarded(server: Live) -> None:
    client = server.client()
    for method, path in PATHS:
        answer = client.request(method, path)
        assert answer.status_code == 401, (method, path)
        assert answer.json()["error"]["code"] == "invalid_api_key"
        assert answer.headers["www-authenticate"] == "Bearer"


@pytest.fixture
def keys() -> Tenants:
    return Tenants.of_keys([("first", "right"), ("second", "other")])


@pytest.fixture
def open_live(serve: MakeServer, keys: Tenants, monkeypatch: pytest.MonkeyPatch) -> Callable[[FakeEngine], Live]:
    """A server with a health route."""
    monkeypatch.setattr("tests.server.live.make_app", lambda serving, known: make_app(serving, known, health=HEALTH))
    return lambda engine: serve(engine, keys)


def test_every_route_but_health_needs_a_key(open_live: Callable[[FakeEngine], Live]) -> None:
    server = open_live(FakeEngine())
    everything_is_guarded(server)
    assert server.client().get("/livez").text == "alive"
    assert server.client("right").get("/v1/models").status_code == 200


def test_the_table_above_has_every_route() -> None:
    app = make_app(Serving.of(FakeEngine()), Tenants(), health=HEALTH)
    paths = {route.path.replace("{id:path}", "x") for route in app.routes if isinstance(route, Route)} - {"/livez"}
    assert paths <= {path for _, path in PATHS}


def test_a_route_that_is_left_open_is_caught(open_live: Callable[[FakeEngine], Live], monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted: one path more is open."""
    right = guard.Guard.__init__

    def one_more(self: Any, app: Any, *, open_paths: Any, **others: Any) -> None:
        right(self, app, open_paths=[*open_paths, "/version"], **others)

    monkeypatch.setattr(guard.Guard, "__init__", one_more)
    server = open_live(FakeEngine())
    with pytest.raises(AssertionError):
        everything_is_guarded(server)
    server.faults.records.clear()


@pytest.mark.parametrize("name", BAD_HEADERS)
def test_what_is_no_known_key_is_refused(name: str, serve: MakeServer, keys: Tenants) -> None:
    engine = FakeEngine()
    answer = serve(engine, keys).client().post("/v1/completions", json=ASK, headers=BAD_HEADERS[name])
    assert answer.status_code == 401
    assert engine.begun == []


@pytest.mark.parametrize("other", ["right", "other", "wrong"])
@pytest.mark.parametrize("is_first", [True, False])
def test_two_keys_are_refused_whatever_they_are(other: str, is_first: bool, serve: MakeServer, keys: Tenants) -> None:
    engine = FakeEngine()
    said = [("Authorization", "Bearer right"), ("authorization", f"Bearer {other}")]
    answer = serve(engine, keys).client().get("/v1/models", headers=said if is_first else said[::-1])
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "ambiguous_header")
    assert "authorization was given 2 times" in answer.json()["error"]["message"]


def test_two_names_of_the_host_are_refused(serve: MakeServer) -> None:
    engine = FakeEngine()
    connection = open_request(serve(engine), "/v1/completions", ASK, more=["Host: evil.example"])
    with connection:
        assert connection.recv(4096).startswith(b"HTTP/1.1 400")
    assert engine.begun == []


def test_an_unknown_key_gets_no_body_read(serve: MakeServer, keys: Tenants) -> None:
    connection = open_request(serve(FakeEngine(), keys), "/v1/completions", None, length=2**30)
    with connection:
        assert connection.recv(4096).startswith(b"HTTP/1.1 401")


def the_tenant_is_the_keys(server: Live, engine: FakeEngine) -> None:
    for key, tenant in [("right", "first"), ("other", "second")]:
        body = ASK | {"user": "third", "cache_salt": "first"}
        headers = {"x-tenant": "third", "openai-organization": "third", "openai-project": "third"}
        answer = server.client(key).post("/v1/completions?tenant=third", json=body, headers=headers)
        assert answer.status_code == 200
        assert engine.begun[-1].tenant == tenant
        refused = server.client(key).post("/v1/completions", json=ASK | {"tenant": "third"})
        assert refused.json()["error"]["param"] == "tenant"


def test_the_tenant_comes_from_the_key_alone(serve: MakeServer, keys: Tenants) -> None:
    engine = FakeEngine()
    the_tenant_is_the_keys(serve(engine, keys), engine)


@pytest.mark.parametrize("source", ["user", "cache_salt"])
def test_a_tenant_taken_from_the_body_is_caught(
    source: str, serve: MakeServer, keys: Tenants, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Planted: the engine is told what the client says of itself."""
    engine = FakeEngine()
    right = FakeEngine.generate

    def from_body(self: FakeEngine, request: Any, at_once: Any = None) -> Any:
        import msgspec

        said = "third" if source == "user" else request.cache_salt
        return right(self, msgspec.structs.replace(request, tenant=said), at_once)

    monkeypatch.setattr(FakeEngine, "generate", from_body)
    with pytest.raises(AssertionError):
        the_tenant_is_the_keys(serve(engine, keys), engine)


def compares_every_entry(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is asked, each entry is compared once, by the comparison that takes as long for any two digests."""
    compared: list[bytes] = []

    def counted(one: bytes, other: bytes) -> bool:
        compared.append(one)
        return hmac.compare_digest(one, other)

    monkeypatch.setattr(tenants, "hmac", type("Hmac", (), {"compare_digest": staticmethod(counted)}))
    known = Tenants.of_keys([(f"tenant-{place}", f"key-{place}") for place in range(5)])
    for key, tenant in [("key-0", "tenant-0"), ("key-4", "tenant-4"), ("key-9", None), ("", None)]:
        compared.clear()
        assert known.tenant_of(key) == tenant
        assert len(compared) == 5


def test_a_key_is_compared_with_every_entry_in_constant_time(monkeypatch: pytest.MonkeyPatch) -> None:
    compares_every_entry(monkeypatch)
    tree = ast.parse(inspect.getsource(tenants.Tenants.tenant_of).lstrip().replace("\n    ", "\n"))
    assert not [node for node in ast.walk(tree) if isinstance(node, ast.Eq | ast.In | ast.Break)]


@pytest.mark.parametrize("fault", ["==", "the first that fits"])
def test_a_key_compared_otherwise_is_caught(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def by_equality(self: Tenants, key: str) -> str | None:
        return next((entry.tenant for entry in self._entries if entry.digest == tenants.digest_of(key)), None)

    def by_first(self: Tenants, key: str) -> str | None:
        for entry in self._entries:
            if tenants.hmac.compare_digest(entry.digest, tenants.digest_of(key)):
                return entry.tenant
        return None

    monkeypatch.setattr(Tenants, "tenant_of", by_equality if fault == "==" else by_first)
    with pytest.raises(AssertionError):
        compares_every_entry(monkeypatch)


def test_no_key_is_kept(tmp_path: Path) -> None:
    key, line = new_key("tenant")
    file = tmp_path / "keys"
    file.write_text(f"# a comment\n\n{line}\nother  sha256:{'0' * 64}\n")
    known = Tenants.from_file(file)
    assert known.tenant_of(key) == "tenant"
    assert known.tenant_of(line.split(":")[1]) is None
    assert key not in file.read_text()
    assert key not in repr(vars(known))
    assert new_key("tenant")[0] != key
    assert not known.is_open


def test_the_command_draws_a_key_and_its_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from blocktable.cli.command import main

    assert main(["key", "alice"]) == 0
    told = capsys.readouterr()
    (tmp_path / "keys").write_text(told.out)
    key = told.err.split()[-1]
    assert Tenants.from_file(tmp_path / "keys").tenant_of(key) == "alice"
    assert key not in told.out
    assert main(["key", "two words"]) == 2


BAD_FILES = {
    "no such file": (None, "cannot be read"),
    "nothing": ("", "holds no key"),
    "a key in the clear": ("tenant bt-secret", "must be a line"),
    "too short": ("tenant sha256:00", "must be a line"),
    "no tenant": (f"sha256:{'0' * 64}", "must be a line"),
    "a key twice": (f"a sha256:{'0' * 64}\nb sha256:{'0' * 64}", "twice"),
    "a long tenant": (f"{'x' * 257} sha256:{'0' * 64}", "1..256 bytes"),
}


@pytest.mark.parametrize("name", BAD_FILES)
def test_a_bad_file_of_keys_is_refused_and_shows_no_key(name: str, tmp_path: Path) -> None:
    text, word = BAD_FILES[name]
    file = tmp_path / "keys"
    if text is not None:
        file.write_text(text)
    with pytest.raises(InvalidInputError, match=word) as caught:
        Tenants.from_file(file)
    assert "secret" not in str(caught.value)


def test_a_mark_of_the_order_of_bytes_is_no_part_of_a_tenant(tmp_path: Path) -> None:
    key, line = new_key("alice")
    (tmp_path / "keys").write_text(f"\ufeff{line}\n", encoding="utf-8")
    assert Tenants.from_file(tmp_path / "keys").tenant_of(key) == "alice"


def test_a_file_of_keys_that_hangs_holds_nobody_up(tmp_path: Path) -> None:
    """A pipe into which nobody has written yet: what is read again when somebody has."""
    old, old_line = new_key("alice")
    new, new_line = new_key("bob")
    file = tmp_path / "keys"
    file.write_text(old_line)
    app = ServeApp(ServeOptions(model="m", api_key_file=str(file)))
    file.unlink()
    os.mkfifo(file)
    app.read_keys()
    assert app._tenants.tenant_of(old) == "alice"
    file.write_text(new_line)
    until_s = time.monotonic() + 30
    while app._tenants.tenant_of(new) is None:
        assert time.monotonic() < until_s
        time.sleep(0.01)
    assert app._tenants.tenant_of(old) is None


@pytest.mark.parametrize("tenant", ["", "two words", "x" * 257, "#remark", "\udcff", "bell\x07", "\ufeffalice"])
def test_a_tenant_is_a_word(tenant: str) -> None:
    with pytest.raises(InvalidInputError):
        new_key(tenant)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.1", "example.org", ""])
def test_without_keys_only_this_machine_is_listened_to(host: str, keys: Tenants) -> None:
    with pytest.raises(InvalidInputError, match="loopback"):
        Tenants().check_host(host)
    keys.check_host(host)
    for local in ("127.0.0.1", "::1", "localhost", "127.8.8.8"):
        Tenants().check_host(local)


@pytest.mark.parametrize("host", ["evil.example", "evil.example:80", "10.0.0.1:80", "", "localhost.evil.example"])
def test_without_keys_a_page_of_elsewhere_gets_nothing(host: str, serve: MakeServer) -> None:
    """A browser that was led here by another name sends that name."""
    engine = FakeEngine()
    answer = serve(engine).client().post("/v1/completions", json=ASK, headers={"host": host})
    assert answer.status_code in (400, 403)
    assert engine.begun == []


PAGES = {
    "led here by another name": ("GET", "127.0.0.1", {"host": "evil.example:8001"}, 403),
    "orders from elsewhere": ("POST", "127.0.0.1", {"host": "127.0.0.1:8001", "origin": "http://evil.example"}, 403),
    "orders from nowhere": ("POST", "10.0.0.1", {"host": "10.0.0.1:8001", "origin": "null"}, 403),
    "our own page": ("POST", "127.0.0.1", {"host": "LocalHost:8001", "origin": "http://LocalHost:8001"}, 200),
    "a program": ("POST", "127.0.0.1", {"host": "127.0.0.1:8001"}, 200),
    "a program, another machine": ("GET", "10.0.0.1", {"host": "blocktable.internal"}, 200),
}


@pytest.mark.parametrize("name", PAGES)
@pytest.mark.parametrize("is_guarded", [True, False], ids=["as it is", "planted: nobody looks"])
def test_a_page_of_elsewhere_gets_nothing_of_the_admin_port(
    name: str, is_guarded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    method, address, headers, status = PAGES[name]
    if not is_guarded:
        monkeypatch.setattr(guard, "_check_page", lambda scope: None)
    app = make_admin_app(FakeEngine(), cast(Metrics, None), stall_s=30)

    async def ask() -> tuple[int, int]:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url=f"http://{address}:8001") as client:
            path = "/reset_prefix_cache" if method == "POST" else "/debug/stall"
            health = await client.get("/livez", headers=headers)
            return (await client.request(method, path, headers=headers)).status_code, health.status_code

    assert asyncio.run(ask()) == (status if is_guarded else 200, 200)


def test_without_keys_another_machine_gets_nothing() -> None:
    import asyncio

    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    app = guard.Guard(None, Tenants(), [])  # type: ignore[arg-type]
    scope = {"type": "http", "path": "/version", "headers": [(b"host", b"localhost")], "client": ("10.0.0.1", 5)}
    asyncio.run(app(scope, None, send))  # type: ignore[arg-type]
    assert sent[0]["status"] == 403


def test_two_tenants_share_no_block_whatever_the_client_says(
    make_async: Callable[..., AsyncLLM], serve: MakeServer, keys: Tenants
) -> None:
    """Catalogue 46: the second tenant sends the first one's salt too, and finds nothing; the same tenant again finds it."""
    server = serve(make_async(), keys)

    def cached(key: str, **said: Any) -> int:
        body = {"prompt": list(range(40)), "max_tokens": 1} | said
        details = server.client(key).post("/v1/completions", json=body).json()["usage"]["prompt_tokens_details"]
        return int(details["cached_tokens"])

    assert cached("right", cache_salt="salt") == 0
    assert cached("other", cache_salt="salt") == 0
    assert cached("other") == 0
    assert cached("right", cache_salt="salt") == 39
    assert cached("right") == 0
