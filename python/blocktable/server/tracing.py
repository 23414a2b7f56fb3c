"""A trace of each request, in OpenTelemetry's form: a span for the whole of it, and one for each phase of its life.

Before: `request_watch.py` has seen a request end. After: any `Tracer` of OpenTelemetry, which keeps the spans and has them sent
by a thread of its own. Always: nothing of OpenTelemetry is imported unless somebody asked for traces; a span tells times and
counts, never a text.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from importlib import import_module
from importlib.util import find_spec
from types import MappingProxyType
from typing import Any

from ..errors import MissingExtraError
from .engine_client import Times

NEEDS = ("opentelemetry.sdk", "opentelemetry.exporter.otlp.proto.http")

CLOSE_S = 5.0
"""Seconds that the last spans get to be sent."""


class Tracing:
    """Makes the spans of requests that ended. `tracer`, `set_span_in_context` and `extract` are OpenTelemetry's."""

    def __init__(
        self,
        tracer: Any,
        set_span_in_context: Callable[[Any], Any],
        extract: Callable[[Mapping[str, str]], Any],
        close: Callable[[], object],
    ) -> None:
        self._tracer = tracer
        self._set_span_in_context = set_span_in_context
        self._extract = extract
        self._close = close

    def tell(
        self,
        begun_s: float,
        times: Times | None,
        attributes: Mapping[str, str | int],
        headers: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        """One request, which came at `begun_s` and ended now. Without `times`, which come with its end from the engine, nobody
        knows of its phases. `headers` name the client's span, which it then is a part of; headers that name none count as
        none."""
        since_1970_ns = time.time_ns() - time.monotonic_ns()

        def at_ns(seconds: float) -> int:
            return int(seconds * 1e9) + since_1970_ns

        given = {name: value for name, value in attributes.items() if value != ""}
        outer = self._extract(headers) if headers else None
        whole = self._tracer.start_span("llm_request", context=outer, start_time=at_ns(begun_s), attributes=given)
        context = self._set_span_in_context(whole)
        for name, start_s, end_s in phases(times):
            self._tracer.start_span(name, context=context, start_time=at_ns(start_s)).end(end_time=at_ns(end_s))
        whole.end()

    def close(self) -> None:
        """Send what is kept, if that is possible in `CLOSE_S`."""
        closing = threading.Thread(target=self._close, name="blocktable-tracing", daemon=True)
        closing.start()
        closing.join(CLOSE_S)


def phases(times: Times | None) -> list[tuple[str, float, float]]:
    """(`queued`, `prefill`, `decode` or `preempted`, from, to) of those that a request came to."""
    if times is None or times.scheduled_s is None:
        return []
    found = [("queued", times.arrived_s, times.scheduled_s)]
    if times.first_s is not None:
        found.append(("prefill", times.scheduled_s, times.first_s))
    if times.first_s is not None and times.last_s is not None:
        found.append(("decode", times.first_s, times.last_s))
    return [*found, *(("preempted", lost_s, back_s) for lost_s, back_s in times.preempted)]


def check_tracing() -> None:
    """Raises `MissingExtraError` naming the extra."""
    for module in NEEDS:
        try:
            is_there = find_spec(module) is not None
        except ModuleNotFoundError:
            is_there = False
        if not is_there:
            raise MissingExtraError("otlp_traces_endpoint", "tracing", module)


def make_tracing(endpoint: str, model: str) -> Tracing:
    """Sends to a collector that speaks OTLP over HTTP at this address. Raises `MissingExtraError`."""
    check_tracing()
    # Untyped where it is not installed.
    needed = ["sdk.resources", "sdk.trace", "sdk.trace.export", "trace", "trace.propagation.tracecontext"]
    needed.append("exporter.otlp.proto.http.trace_exporter")
    resources, sdk, export, trace, w3c, otlp = (import_module(f"opentelemetry.{name}") for name in needed)
    told = {"service.name": "blocktable", "gen_ai.response.model": model}
    provider = sdk.TracerProvider(resource=resources.Resource.create(told))
    provider.add_span_processor(export.BatchSpanProcessor(otlp.OTLPSpanExporter(endpoint=endpoint)))
    extract = w3c.TraceContextTextMapPropagator().extract
    return Tracing(provider.get_tracer("blocktable"), trace.set_span_in_context, extract, provider.shutdown)
