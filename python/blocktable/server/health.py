"""Routes that say how a serving process is: answered from memory, never from the engine, whatever that one does.

Before: a probe of an orchestrator, a balancer, a watchdog. After: an `EngineClient`'s state and progress, as last heard.
Always: they need no key, never wait, and tell no more than counts.

| route | 200 when | 503 when |
|---|---|---|
| `/livez` | the event loop answers | never |
| `/readyz` | new requests are taken in | it starts, drains or is dead |
| `/healthz/progress` | nothing is to do, or steps are made | work is at hand and no step ends, or nothing is heard; dead |
| `/health`, `/ping` | as `/healthz/progress` | the same, and while it starts |
"""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from .engine_client import EngineClient, EngineState

RETRY_S = 5
"""What `Retry-After` says while the engine is not ready: about what a restart on a small model takes."""


def is_moving(client: EngineClient, stall_s: float) -> bool:
    """Whether steps are made, or none has to be."""
    progress, state = client.progress, client.state
    if state is EngineState.DEAD:
        return False
    is_heard = state is EngineState.STARTING or progress.heard_s <= stall_s
    return is_heard and progress.still_s <= stall_s


def health_routes(client: EngineClient, *, stall_s: float) -> list[Route]:
    """The routes above, for any app. `stall_s`: seconds without a step from which on nothing moves."""

    def answer(*, is_good: bool) -> JSONResponse:
        progress = client.progress
        told = {
            "status": "ok" if is_good else "unavailable",
            "state": client.state.value,
            "num_running": progress.num_running,
            "num_waiting": progress.num_waiting,
            "num_steps": progress.num_steps,
            "still_s": round(progress.still_s, 3),
            "heard_s": round(progress.heard_s, 3),
        }
        return JSONResponse(told, 200 if is_good else 503, {} if is_good else {"Retry-After": str(RETRY_S)})

    async def livez(request: Request) -> JSONResponse:
        return JSONResponse({"status": "ok"})

    async def readyz(request: Request) -> JSONResponse:
        return answer(is_good=client.state is EngineState.READY)

    async def progress(request: Request) -> JSONResponse:
        return answer(is_good=is_moving(client, stall_s))

    async def health(request: Request) -> JSONResponse:
        return answer(is_good=client.state is not EngineState.STARTING and is_moving(client, stall_s))

    return [
        Route("/livez", livez),
        Route("/readyz", readyz),
        Route("/healthz/progress", progress),
        Route("/health", health),
        Route("/ping", health, methods=["GET", "POST"]),
    ]
