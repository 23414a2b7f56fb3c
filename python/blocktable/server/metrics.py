"""Prometheus' text of one server, made when it is asked for.

Before: `EngineClient.snapshot` (the core's counters, the step loop's clocks), what `request_watch.py` counted, the process's
own figures; `vllm_series.py` and `own_series.py` say what is told of them. After: `/metrics` of `admin.py`. Always: an engine
that does not answer leaves out its own series and nobody else's. Labels of every series: `model_name`, `engine`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from ..errors import BlocktableError
from .engine_client import EngineClient, EngineInfo
from .histogram import Histogram
from .own_series import OWN_SERIES
from .refusals import Refusals
from .request_watch import RequestFigures
from .series import Series, Sources
from .vllm_series import VLLM_SERIES

SERIES = (*VLLM_SERIES, *OWN_SERIES)

FRESH_S = 0.5
"""Seconds that a snapshot serves for several scrapes."""

PATIENCE_S = 2.0
"""Seconds that a scrape waits for the engine."""


class Metrics:
    """Prometheus' text for one server."""

    def __init__(
        self,
        client: EngineClient,
        requests: RequestFigures,
        *,
        num_deaths: Callable[[], int] = lambda: 0,
        lost_log_lines: Callable[[], int] = lambda: 0,
        model_name: str | None = None,
        refusals: Refusals | None = None,
    ) -> None:
        """`model_name`: what clients call the model; None = as the engine does."""
        self._model_name = model_name
        self._client = client
        self._requests = requests
        self._refusals = Refusals() if refusals is None else refusals
        self._num_deaths = num_deaths
        self._lost_log_lines = lost_log_lines
        self._asked_at = float("-inf")
        self._snapshot: Mapping[str, Any] | None = None
        self._lock = asyncio.Lock()

    async def text(self, accept: str | None = None) -> tuple[bytes, str]:
        """The text and its content type, as the header `Accept` wants it. Waits at most `PATIENCE_S` for the engine."""
        sources = Sources(
            engine=await self._fresh_snapshot(),
            requests=self._requests,
            refusals=self._refusals,
            progress=self._client.progress,
            state=self._client.state,
            info=self._info(),
            num_deaths=self._num_deaths(),
            lost_log_lines=self._lost_log_lines(),
        )
        registry = CollectorRegistry()
        name = self._model_name or ("" if sources.info is None else sources.info.model)
        registry.register(_Table(sources, name))
        encode, content_type = choose_encoder(accept or "")
        return encode(registry), content_type

    async def _fresh_snapshot(self) -> Mapping[str, Any] | None:
        async with self._lock:
            if time.monotonic() - self._asked_at >= FRESH_S:
                try:
                    self._snapshot = await asyncio.wait_for(self._client.snapshot(), PATIENCE_S)
                except (BlocktableError, TimeoutError):
                    self._snapshot = None
                self._asked_at = time.monotonic()
            return self._snapshot

    def _info(self) -> EngineInfo | None:
        try:
            return self._client.info
        except BlocktableError:
            return None


class _Table(Collector):
    """`SERIES` with the values of one moment."""

    def __init__(self, sources: Sources, model_name: str) -> None:
        self._sources = sources
        self._always = (model_name, "0")

    def collect(self) -> Iterator[Metric]:
        for series in SERIES:
            if series.of_engine and self._sources.engine is None:
                continue
            yield self._family(series)

    def _family(self, series: Series) -> Metric:
        labels = ("model_name", "engine", *series.labels)
        value = series.read(self._sources)
        if isinstance(value, Histogram):
            histogram = HistogramMetricFamily(series.name, series.meaning, labels=labels)
            histogram.add_metric(self._always, value.buckets(), value.sum)
            return histogram
        kind = GaugeMetricFamily if series.kind == "gauge" else CounterMetricFamily
        family: GaugeMetricFamily | CounterMetricFamily = kind(series.name, series.meaning, labels=labels)
        for given, number in value:
            family.add_metric((*self._always, *given), number)
        return family
