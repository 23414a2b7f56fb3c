"""Promise: with traces on, each request that ends is one trace, with a span for each phase that it came to; off, nothing of
OpenTelemetry is asked or imported; a tracer that fails stops nobody's answer."""

import asyncio
import subprocess
import sys
import threading
from collections.abc import AsyncGenerator
from contextlib import aclosing
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest

from blocktable.errors import MissingExtraError
from blocktable.server import endpoint, tracing
from blocktable.server.engine_client import EngineRequest, Piece, Times
from blocktable.server.in_process import InProcessEngine
from blocktable.server.request_watch import WatchedClient
from blocktable.server.tracing import Tracing, check_tracing, make_tracing, phases
from tests.engine.conftest import MakeAsync

from .conftest import MakeServer
from .fake_engine import FakeEngine
from .processes import read, request

LIFE = Times(10.0, 12.0, 15.0, 20.0, [(16.0, 17.0)])


class Span:
    def __init__(self, tracer: "Tracer", name: str, context: "Span | None", start_time: int, attributes: Any) -> None:
        self.name, self.parent, self.start_ns, self.attributes = name, context, start_time, attributes
        self.end_ns: int | None = None
        self._tracer = tracer

    def end(self, end_time: int | None = None) -> None:
        self.end_ns = end_time
        self._tracer.ended.append(self)


class Tracer:
    """In place of OpenTelemetry's."""

    def __init__(self) -> None:
        self.ended: list[Span] = []

    def start_span(self, name: str, *, start_time: int, context: Span | None = None, attributes: Any = None) -> Span:
        return Span(self, name, context, start_time, attributes)


def traced(tracer: Any) -> Tracing:
    return Tracing(tracer, lambda span: span, lambda headers: headers["traceparent"], lambda: None)


async def with_times(asked: EngineRequest) -> AsyncGenerator[Piece, None]:
    yield Piece("a", [1])
    yield Piece("b", [2], "stop", times=LIFE)


def test_each_phase_is_a_span_of_the_request() -> None:
    tracer = Tracer()
    client = WatchedClient(FakeEngine(with_times), tracing=traced(tracer))
    asyncio.run(_read(client, request([1, 2, 3], 5, "r", tenant="acme")))
    *parts, whole = tracer.ended
    assert [span.name for span in parts] == ["queued", "prefill", "decode", "preempted"]
    assert all(span.parent is whole for span in parts)
    lengths = [round(((span.end_ns or 0) - span.start_ns) / 1e9, 3) for span in parts]
    assert lengths == [2.0, 3.0, 5.0, 1.0]
    assert whole.attributes == {
        "gen_ai.request.id": "r",
        "gen_ai.request.n": 1,
        "gen_ai.usage.prompt_tokens": 3,
        "gen_ai.usage.completion_tokens": 2,
        "blocktable.cached_tokens": 0,
        "blocktable.tenant": "acme",
        "blocktable.ended": "stop",
    }


@pytest.mark.parametrize(
    ("times", "names"),
    [
        (None, []),
        (Times(1.0), []),
        (Times(1.0, 2.0), ["queued"]),
        (Times(1.0, 2.0, 3.0, 4.0), ["queued", "prefill", "decode"]),
    ],
)
def test_phases_that_it_did_not_come_to_are_no_spans(times: Times | None, names: list[str]) -> None:
    assert [name for name, _, _ in phases(times)] == names


TRACE = "0af7651916cd43dd8448eb211c80319c"
HEADERS = {"traceparent": f"00-{TRACE}-b7ad6b7169203331-01", "tracestate": "vendor=1"}


def test_a_request_is_a_part_of_the_span_that_its_client_names(serve: MakeServer) -> None:
    tracer = Tracer()
    client = WatchedClient(FakeEngine(with_times), tracing=traced(tracer))
    ask = {"prompt": [1, 2], "max_tokens": 3}
    for headers in (HEADERS, {}):
        answer = serve(client).client().post("/v1/completions", json=ask, headers=headers)
        assert answer.status_code == 200, answer.text
    parents = [span.parent for span in tracer.ended if span.name == "llm_request"]
    assert parents == [HEADERS["traceparent"], None]


def test_headers_that_are_lost_on_the_way_are_caught(serve: MakeServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoint, "TRACE_HEADERS", ())
    with pytest.raises(AssertionError, match="parents|None"):
        test_a_request_is_a_part_of_the_span_that_its_client_names(serve)


async def _read(client: WatchedClient, asked: EngineRequest) -> list[Piece]:
    return await read(client, asked)


def test_the_engine_tells_the_phases_in_their_order(make_async: MakeAsync) -> None:
    """A small pool, so that somebody is preempted on the way."""
    tracer = Tracer()
    client = WatchedClient(InProcessEngine(make_async(num_blocks=14, estimate_growth=False)), tracing=traced(tracer))

    async def main() -> None:
        await asyncio.gather(*(_read(client, request([place] * 9, 60, f"r{place}")) for place in range(3)))

    asyncio.run(main())
    by_parent: dict[int, list[Span]] = {}
    for span in tracer.ended:
        if span.parent is not None:
            by_parent.setdefault(id(span.parent), []).append(span)
    assert len(by_parent) == 3
    for spans in by_parent.values():
        queued, prefill, decode, *lost = spans
        assert queued.end_ns == prefill.start_ns
        assert prefill.end_ns == decode.start_ns
        assert all(span.name == "preempted" and (span.end_ns or 0) > span.start_ns for span in lost)
        assert all(one.start_ns <= (one.end_ns or 0) for one in spans)
    assert any(len(spans) > 3 for spans in by_parent.values()), "somebody was preempted"


def test_who_leaves_is_a_trace_without_phases() -> None:
    tracer = Tracer()
    client = WatchedClient(FakeEngine(with_times), tracing=traced(tracer))

    async def main() -> None:
        async with aclosing(client.generate(request([1], 5, "r"))) as pieces:
            await anext(pieces)

    asyncio.run(main())
    [whole] = tracer.ended
    assert whole.attributes["blocktable.ended"] == "left"


def test_a_tracer_that_fails_stops_no_answer_and_is_counted() -> None:
    client = WatchedClient(FakeEngine(with_times), tracing=traced(object()))
    pieces = asyncio.run(_read(client, request([1], 5, "r")))
    assert [piece.text for piece in pieces] == ["a", "b"]
    assert client.figures.num_faults == 1


def test_off_nothing_of_it_is_imported() -> None:
    line = "import sys, blocktable.server.server_process; sys.exit(any(n.startswith('opentelemetry') for n in sys.modules))"
    assert subprocess.run([sys.executable, "-c", line], check=False).returncode == 0


def test_without_the_extra_it_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracing, "NEEDS", ("no_such_module.below",))
    with pytest.raises(MissingExtraError, match="tracing"):
        check_tracing()
    with pytest.raises(MissingExtraError, match="otlp_traces_endpoint"):
        make_tracing("http://127.0.0.1:1/v1/traces", "m")


def test_a_collector_gets_the_spans() -> None:
    pytest.importorskip("opentelemetry.sdk", reason="needs the extra `tracing`")
    bodies: list[bytes] = []

    class Collector(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            bodies.append(self.rfile.read(int(self.headers["content-length"])))
            self.send_response(200)
            self.end_headers()

        def log_request(self, code: Any = None, size: Any = None) -> None:
            return

    with HTTPServer(("127.0.0.1", 0), Collector) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        made = make_tracing(f"http://127.0.0.1:{server.server_port}/v1/traces", "chat")
        made.tell(9.5, LIFE, {"gen_ai.request.id": "cmpl-7"})
        made.tell(9.5, LIFE, {"gen_ai.request.id": "cmpl-8"}, HEADERS)
        made.tell(9.5, LIFE, {"gen_ai.request.id": "cmpl-9"}, {"traceparent": "00-nonsense"})
        made.close()
        server.shutdown()
    told = b"".join(bodies)
    assert told.count(bytes.fromhex(TRACE)) == 5, "the whole, and its four phases"
    assert b"cmpl-9" in told
    for word in (b"llm_request", b"queued", b"prefill", b"decode", b"preempted", b"cmpl-7", b"chat"):
        assert word in told
