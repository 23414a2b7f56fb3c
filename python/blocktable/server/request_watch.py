"""What clients see of an engine: times and tokens of each request, counted and logged where the pieces pass.

Before: the routes ask it as they would ask the engine. After: any `EngineClient`. Always: it changes nothing of what passes;
a tenant beyond the first `MAX_TENANTS` is counted as `other`, so that no client makes the metrics grow; a line of the log
holds no prompt unless that was asked for.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import Any, TypeVar

from ..errors import BlocktableError, EngineDeadError
from ..text.tokenizer_parts import TokenizerParts
from .engine_client import AtOnce, EngineClient, EngineInfo, EngineRequest, EngineState, Piece, Progress, Times
from .histogram import COUNTS, FIRST_S, SHORT_S, WHOLE_S, Histogram
from .logs import Event, tell
from .packed_map import BlockMap
from .tracing import Tracing

logger = logging.getLogger("blocktable.requests")

T = TypeVar("T")

MAX_TENANTS = 64
OTHER = "other"


class RequestFigures:
    """Of all requests since the server started."""

    def __init__(self, *, logs_prompts: bool = False) -> None:
        self.logs_prompts = logs_prompts
        self.first_token_s = Histogram(FIRST_S)
        self.between_tokens_s = Histogram(SHORT_S)
        self.per_output_token_s = Histogram(SHORT_S)
        self.whole_s = Histogram(WHOLE_S)
        self.prompt_tokens = Histogram(COUNTS)
        self.output_tokens = Histogram(COUNTS)
        self.max_tokens = Histogram(COUNTS)
        self.num_answers = Histogram(COUNTS)
        self.queued_s = Histogram(WHOLE_S)
        self.prefill_s = Histogram(WHOLE_S)
        self.decode_s = Histogram(WHOLE_S)
        self.inference_s = Histogram(WHOLE_S)
        self.num_open = 0
        self.num_faults = 0
        """Times that noting something failed."""
        self.ends: Counter[str] = Counter()
        """Answers by how they ended: a finish reason, `left` by the client, or the name of an error."""
        self.tenant_ends: Counter[tuple[str, str]] = Counter()
        """Requests by (tenant, how); of several answers it is how the last one ended."""
        self.tenant_tokens: Counter[tuple[str, str]] = Counter()
        """Tokens by (tenant, `prompt`, `cached` or `output`)."""
        self._tenants: set[str] = set()

    def tenant(self, name: str | None) -> str:
        """What a tenant is called in metrics; no tenant is the empty name."""
        if name is None:
            return ""
        if name not in self._tenants:
            if len(self._tenants) >= MAX_TENANTS:
                return OTHER
            self._tenants.add(name)
        return name


class WatchedRequest:
    """One request while it passes. Times are of one monotonic clock."""

    __slots__ = ("_figures", "_last_s", "_num_unended", "begun_s", "first_s", "num_cached", "num_outputs", "request", "times")

    def __init__(self, figures: RequestFigures, request: EngineRequest) -> None:
        self._figures = figures
        self.request = request
        self.begun_s = time.monotonic()
        self._last_s: dict[int, float] = {}  # by the answer's index
        self._num_unended: int = request.sampling.get("n", 1)
        self.first_s: float | None = None
        self.num_outputs = 0
        self.num_cached = 0
        self.times: Times | None = None

    def saw(self, piece: Piece) -> None:
        """A piece passes."""
        count = len(piece.token_ids)
        if piece.finish_reason is not None:
            self._figures.ends[piece.finish_reason] += 1
            self._num_unended -= 1
        if piece.times is not None:
            self.times = piece.times
        if not count:
            return
        now = time.monotonic()
        figures = self._figures
        last_s = self._last_s.get(piece.index)
        if self.first_s is None:
            self.first_s = now
            figures.first_token_s.observe(now - self.begun_s)
        if last_s is not None:
            figures.between_tokens_s.observe((now - last_s) / count, count)
        elif count > 1 and self.request.is_streamed:
            figures.between_tokens_s.observe(0.0, count - 1)
        self._last_s[piece.index] = now
        self.num_outputs += count
        self.num_cached = piece.num_cached_tokens or 0

    def ended(self, how: str) -> None:
        """It is over."""
        figures, request = self._figures, self.request
        whole_s = time.monotonic() - self.begun_s
        num_prompt = len(request.prompt_token_ids)
        tenant = figures.tenant(request.tenant)
        if self._num_unended:
            figures.ends[how] += self._num_unended
        figures.tenant_ends[tenant, how] += 1
        figures.tenant_tokens[tenant, "prompt"] += num_prompt
        figures.tenant_tokens[tenant, "cached"] += self.num_cached
        figures.tenant_tokens[tenant, "output"] += self.num_outputs
        figures.whole_s.observe(whole_s)
        figures.prompt_tokens.observe(num_prompt)
        figures.output_tokens.observe(self.num_outputs)
        limit = request.sampling.get("max_tokens")
        if isinstance(limit, int):
            figures.max_tokens.observe(limit)
        figures.num_answers.observe(request.sampling.get("n", 1))
        self._observe_phases()
        num_answers = len(self._last_s)
        if self.first_s is not None and self.num_outputs > num_answers and request.is_streamed:
            later = (self.num_outputs - num_answers) / num_answers
            figures.per_output_token_s.observe((max(self._last_s.values()) - self.first_s) / later)
        tell(
            logger,
            Event.REQUEST_ENDED,
            f"request {request.request_id}: {how}",
            request_id=request.request_id,
            tenant=request.tenant,
            how=how,
            prompt_tokens=num_prompt,
            cached_tokens=self.num_cached,
            output_tokens=self.num_outputs,
            first_token_s=None if self.first_s is None else round(self.first_s - self.begun_s, 6),
            whole_s=round(whole_s, 6),
            prompt_token_ids=request.prompt_token_ids if figures.logs_prompts else None,
        )

    def _observe_phases(self) -> None:
        times, figures = self.times, self._figures
        if times is None or times.scheduled_s is None:
            return
        figures.queued_s.observe(times.scheduled_s - times.arrived_s)
        if times.first_s is not None and times.last_s is not None:
            figures.prefill_s.observe(times.first_s - times.scheduled_s)
            figures.decode_s.observe(times.last_s - times.first_s)
            figures.inference_s.observe(times.last_s - times.scheduled_s)

    def trace(self, tracing: Tracing, how: str) -> None:
        """Have its spans made."""
        request = self.request
        attributes = {
            "gen_ai.request.id": request.request_id,
            "gen_ai.request.n": request.sampling.get("n", 1),
            "gen_ai.usage.prompt_tokens": len(request.prompt_token_ids),
            "gen_ai.usage.completion_tokens": self.num_outputs,
            "blocktable.cached_tokens": self.num_cached,
            "blocktable.tenant": request.tenant or "",
            "blocktable.ended": how,
        }
        tracing.tell(self.begun_s, self.times, attributes, request.trace_headers)


class WatchedClient:
    """An `EngineClient` whose requests are watched; everything else goes through as it is."""

    def __init__(self, client: EngineClient, *, logs_prompts: bool = False, tracing: Tracing | None = None) -> None:
        self.figures = RequestFigures(logs_prompts=logs_prompts)
        self._tracing = tracing
        self._client = client

    @property
    def info(self) -> EngineInfo:
        return self._client.info

    @property
    def state(self) -> EngineState:
        return self._client.state

    @property
    def progress(self) -> Progress:
        return self._client.progress

    async def read_tokenizer(self) -> TokenizerParts | None:
        return await self._client.read_tokenizer()

    async def generate(self, request: EngineRequest, at_once: AtOnce | None = None) -> AsyncGenerator[Piece, None]:
        watched = WatchedRequest(self.figures, request)
        how, num_unended = "left", request.sampling.get("n", 1)
        self.figures.num_open += 1

        def seen_at_once(piece: Piece) -> bool:
            if at_once is None or not at_once(piece):
                return False
            self._guarded(watched.saw, piece)
            return True

        try:
            async with aclosing(self._client.generate(request, seen_at_once)) as pieces:
                async for piece in pieces:
                    self._guarded(watched.saw, piece)
                    num_unended -= piece.finish_reason is not None
                    if num_unended == 0:
                        how = piece.finish_reason or how
                    yield piece
        except BlocktableError as error:
            how = "engine_dead" if isinstance(error, EngineDeadError) else type(error).__name__
            raise
        finally:
            self.figures.num_open -= 1
            self._guarded(watched.ended, how)
            tracing = self._tracing
            if tracing is not None:
                self._guarded(lambda told: watched.trace(tracing, told), how)

    def _guarded(self, note: Callable[[T], None], what: T) -> None:
        """Note something. A fault in the books is counted and stops nobody's answer."""
        try:
            note(what)
        except Exception as error:
            self.figures.num_faults += 1
            if self.figures.num_faults == 1:
                logger.error("the books of requests have a fault", exc_info=error)

    async def snapshot(self) -> dict[str, Any]:
        return await self._client.snapshot()

    async def stall(self) -> dict[str, Any]:
        return await self._client.stall()

    async def explain(self, request_id: str) -> dict[str, Any]:
        return await self._client.explain(request_id)

    async def block_map(self) -> BlockMap:
        return await self._client.block_map()

    async def block_namings(self, block: int) -> list[dict[str, Any]]:
        return await self._client.block_namings(block)

    async def reset_prefix_cache(self) -> int:
        return await self._client.reset_prefix_cache()

    async def drain(self, timeout_s: float) -> bool:
        return await self._client.drain(timeout_s)

    async def close(self) -> None:
        await self._client.close()
