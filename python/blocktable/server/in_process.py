"""An engine in the process of its HTTP side, behind the same seam: for tests, and for `blocktable serve --in-process`.

Before: somebody made an `AsyncLLM`. After: the routes ask through `EngineClient`. Always: the engine is its maker's, but
`close` ends it. A step that computes in Python holds up the event loop by the interpreter's switch interval: a process of its
own does not.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from ..engine.async_llm import AsyncLLM
from ..errors import InvalidInputError
from ..sampling.params import RequestOutputKind, SamplingParams
from ..text.tokenizer_parts import TokenizerParts
from .engine_client import AtOnce, EngineInfo, EngineRequest, EngineState, Piece, Progress, passed_on, pieces_of
from .engine_process import engine_info
from .packed_map import BlockMap
from .snapshot import engine_snapshot, stall_report

POLL_S = 0.05
"""How often a drain looks whether all requests have ended."""


class InProcessEngine:
    """An `EngineClient` over an `AsyncLLM`."""

    def __init__(self, engine: AsyncLLM) -> None:
        self._engine = engine
        self._is_draining = False

    @property
    def info(self) -> EngineInfo:
        """See `EngineClient`."""
        return engine_info(self._engine.engine)

    @property
    def state(self) -> EngineState:
        """See `EngineClient`."""
        if not self._engine.is_running:
            return EngineState.DEAD
        return EngineState.DRAINING if self._is_draining else EngineState.READY

    @property
    def progress(self) -> Progress:
        """See `EngineClient`."""
        stats = self._engine.scheduler.stats()
        return Progress(
            num_running=stats["running"],
            num_waiting=stats["waiting"],
            num_steps=stats["steps"],
            still_s=self._engine.stalled_s,
            heard_s=0.0,
        )

    async def read_tokenizer(self) -> TokenizerParts | None:
        """See `EngineClient`."""
        try:
            tokenizer = await self._engine.get_tokenizer()
        except InvalidInputError:
            return None
        return await asyncio.to_thread(tokenizer.parts)

    async def generate(self, request: EngineRequest, at_once: AtOnce | None = None) -> AsyncGenerator[Piece, None]:
        """See `EngineClient`."""
        kind = RequestOutputKind.DELTA if request.is_streamed else RequestOutputKind.FINAL_ONLY
        outputs = self._engine.generate(
            {"prompt_token_ids": request.prompt_token_ids, "cache_salt": request.cache_salt},
            SamplingParams(**request.sampling, output_kind=kind),
            request.request_id,
            tenant=request.tenant,
            priority=request.priority,
            queue_deadline_s=request.queue_deadline_s,
            deadline_s=request.deadline_s,
        )
        async with aclosing(outputs):
            async for output in outputs:
                for piece in pieces_of(output):
                    if not passed_on(piece, at_once):
                        yield piece

    async def snapshot(self) -> dict[str, Any]:
        """See `EngineClient`."""
        return engine_snapshot(self._engine.engine.loop)

    async def stall(self) -> dict[str, Any]:
        """See `EngineClient`."""
        thread = self._engine.step_thread
        live = [(ticket.mailbox.request_id, ticket.number) for ticket in thread.live_tickets]
        return stall_report(self._engine.scheduler, live, thread.native_thread)

    async def explain(self, request_id: str) -> dict[str, Any]:
        """See `EngineClient`."""
        return self._engine.explain(request_id)

    async def block_map(self) -> BlockMap:
        """See `EngineClient`."""
        uses, tenants, names = self._engine.scheduler.block_map()
        return BlockMap(uses.tobytes(), tenants.tobytes(), names)

    async def block_namings(self, block: int) -> list[dict[str, Any]]:
        """See `EngineClient`."""
        return self._engine.block_namings(block)

    async def reset_prefix_cache(self) -> int:
        """See `EngineClient`."""
        return await self._engine.reset_prefix_cache()

    async def drain(self, timeout_s: float) -> bool:
        """See `EngineClient`."""
        self._is_draining = True
        until = asyncio.get_running_loop().time() + timeout_s
        while not (is_over := self._is_idle()) and asyncio.get_running_loop().time() < until:
            await asyncio.sleep(POLL_S)
        await self.close()
        return is_over

    async def close(self) -> None:
        """See `EngineClient`."""
        await asyncio.to_thread(self._engine.shutdown)

    def _is_idle(self) -> bool:
        progress = self.progress
        return progress.num_running + progress.num_waiting == 0
