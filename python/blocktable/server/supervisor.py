"""Keeps an engine's process alive, or says that it gave up: the `EngineClient` of a serving process.

Before: `blocktable serve` starts it, and ends with it. After: `process_client.py`, a new one for each life of the process.
Always: a death is told to every open request at once, whatever becomes of the engine; it is started again at most so often in
so long a time, later each time; while it drains or is closed it is not started again.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Any

from ..errors import BlocktableError, EngineDeadError
from ..text.tokenizer_parts import TokenizerParts
from .engine_client import AtOnce, EngineInfo, EngineRequest, EngineState, Piece, Progress
from .logs import Event, tell
from .packed_map import BlockMap
from .process_client import EngineLaunch, ProcessClient

logger = logging.getLogger("blocktable.server")

NOTHING_HEARD = Progress(num_running=0, num_waiting=0, num_steps=0, still_s=0.0, heard_s=0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Restarts:
    """How often a dead engine is started again. The first time at once, then after pauses that double."""

    at_most: int = 5
    """Restarts in `within_s`; one more death and the supervisor gives up. 0 = never."""
    within_s: float = 600.0
    pause_s: float = 0.5
    longest_pause_s: float = 30.0

    def pause_before(self, num_recent: int) -> float | None:
        """Seconds to wait before a restart after this many in `within_s`; None if that was enough."""
        if num_recent >= self.at_most:
            return None
        return min(self.pause_s * 2 ** (num_recent - 1), self.longest_pause_s) if num_recent else 0.0


class Supervisor:
    """See `EngineClient`. Call `start` first, on the event loop."""

    def __init__(self, launch: EngineLaunch, restarts: Restarts | None = None, *, stall_s: float = 30.0) -> None:
        self.num_deaths = 0
        self._launch = launch
        self._restarts = Restarts() if restarts is None else restarts
        self._stall_s = stall_s
        self._client: ProcessClient | None = None
        self._info: EngineInfo | None = None
        self._is_leaving = False
        self._recent: deque[float] = deque()
        self._tasks: list[asyncio.Task[None]] = []
        self._gave_up: asyncio.Future[EngineDeadError] = asyncio.get_running_loop().create_future()

    async def start(self) -> EngineInfo:
        """Start the engine; returns when it takes requests. Raises what building it raised, and does not try again."""
        info = await self._start_one()
        self._tasks = [asyncio.create_task(self._watch()), asyncio.create_task(self._watch_progress())]
        return info

    async def gave_up(self) -> EngineDeadError:
        """Returns when the engine died and is not started again: of what."""
        return await asyncio.shield(self._gave_up)

    @property
    def process_id(self) -> int | None:
        """Of the engine's process, the newest."""
        return None if self._client is None else self._client.process_id

    @property
    def info(self) -> EngineInfo:
        if self._info is None:
            raise EngineDeadError("it is still being built")
        return self._info

    @property
    def state(self) -> EngineState:
        if self._is_leaving and self._current_state is not EngineState.DEAD:
            return EngineState.DRAINING
        return self._current_state

    @property
    def progress(self) -> Progress:
        return NOTHING_HEARD if self._client is None else self._client.progress

    async def read_tokenizer(self) -> TokenizerParts | None:
        return await self._serving().read_tokenizer()

    def generate(self, request: EngineRequest, at_once: AtOnce | None = None) -> AsyncGenerator[Piece, None]:
        return self._serving().generate(request, at_once)

    async def snapshot(self) -> dict[str, Any]:
        return await self._serving().snapshot()

    async def stall(self) -> dict[str, Any]:
        return await self._serving().stall()

    async def explain(self, request_id: str) -> dict[str, Any]:
        return await self._serving().explain(request_id)

    async def block_map(self) -> BlockMap:
        return await self._serving().block_map()

    async def block_namings(self, block: int) -> list[dict[str, Any]]:
        return await self._serving().block_namings(block)

    async def reset_prefix_cache(self) -> int:
        return await self._serving().reset_prefix_cache()

    async def drain(self, timeout_s: float) -> bool:
        self._is_leaving = True
        return True if self._client is None else await self._client.drain(timeout_s)

    async def close(self) -> None:
        self._is_leaving = True
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._client is not None:
            await self._client.close()

    @property
    def _current_state(self) -> EngineState:
        return EngineState.STARTING if self._client is None else self._client.state

    def _serving(self) -> ProcessClient:
        if self._client is None:
            raise EngineDeadError("it is still being built")
        return self._client

    async def _start_one(self) -> EngineInfo:
        begun = time.monotonic()
        self._client = client = await ProcessClient.start(self._launch)
        tell(logger, Event.ENGINE_STARTING, f"{self._launch.model}: the engine is being built", process=client.process_id)
        info = await asyncio.shield(client.ready)
        self._info = info
        elapsed_s = round(time.monotonic() - begun, 3)
        tell(logger, Event.ENGINE_READY, f"{info.model}: the engine is ready", process=client.process_id, elapsed_s=elapsed_s)
        return info

    async def _watch(self) -> None:
        while True:
            dead = await asyncio.shield(self._serving().ended)
            if self._is_leaving:
                return
            self.num_deaths += 1
            pause_s = self._next_pause()
            tell(
                logger,
                Event.ENGINE_DIED,
                str(dead),
                level=logging.ERROR,
                restarts_in_s=pause_s,
                num_restarts=len(self._recent),
            )
            if pause_s is None:
                tell(logger, Event.ENGINE_GIVEN_UP, "it is not started again", level=logging.CRITICAL)
                self._gave_up.set_result(dead)
                return
            await asyncio.sleep(pause_s)
            self._recent.append(time.monotonic())
            try:
                await self._start_one()
            except (BlocktableError, OSError) as error:
                # Its process ends, or never was: the next turn counts that as a death.
                logger.error("the engine was not built again: %s", error)

    def _next_pause(self) -> float | None:
        oldest = time.monotonic() - self._restarts.within_s
        while self._recent and self._recent[0] < oldest:
            self._recent.popleft()
        return self._restarts.pause_before(len(self._recent))

    async def _watch_progress(self) -> None:
        """Say once that nothing moves, and once that it moves again."""
        is_still = False
        while True:
            await asyncio.sleep(min(1.0, self._stall_s / 4))
            still_s = self.progress.still_s
            if (still_s > self._stall_s) == is_still:
                continue
            is_still = not is_still
            if is_still:
                progress = self.progress
                tell(
                    logger,
                    Event.ENGINE_STALLED,
                    f"no step for {still_s:.1f} s although there is work",
                    level=logging.ERROR,
                    num_running=progress.num_running,
                    num_waiting=progress.num_waiting,
                    heard_s=round(progress.heard_s, 3),
                )
            else:
                tell(logger, Event.ENGINE_MOVES, "steps go on")
