"""The app on the admin port: metrics, health, and what an operator asks or orders.

Before: an operator, or Prometheus, on a port that is not the clients' (loopback, unless said otherwise); there are no keys.
After: an `EngineClient`. Always: what is asked of a stuck engine is answered all the same, or with 503 within seconds; a page
of elsewhere in a browser of that machine gets nothing (`AdminGuard`).

| route | method | what |
|---|---|---|
| `/metrics` | GET | Prometheus' text, see `metrics.py` |
| `/reset_prefix_cache` | POST | forget cached prefixes that no request uses |
| `/debug/explain/{request_id}` | GET | what happened to a request, and what it waits for |
| `/debug/stall` | GET | what waits and why, and where the thread of the steps stands |
| `/dashboard`, `/debug/block/{block}` | GET | see `dashboard_routes.py` |
"""

from __future__ import annotations

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from .asking import answered
from .dashboard_routes import dashboard_routes
from .engine_client import EngineClient
from .guard import AdminGuard
from .health import health_routes
from .metrics import Metrics


def make_admin_app(client: EngineClient, metrics: Metrics, *, stall_s: float) -> Starlette:
    """The app."""

    async def show_metrics(request: Request) -> Response:
        text, content_type = await metrics.text(request.headers.get("accept"))
        return Response(text, headers={"Content-Type": content_type})

    async def reset_prefix_cache(request: Request) -> Response:
        return await answered(client.reset_prefix_cache, lambda count: JSONResponse({"forgotten_blocks": count}))

    async def explain(request: Request) -> Response:
        request_id = request.path_params["request_id"]
        return await answered(lambda: client.explain(request_id), JSONResponse)

    async def stall(request: Request) -> Response:
        progress = client.progress
        shown = {"state": client.state.value, "still_s": progress.still_s, "heard_s": progress.heard_s}
        return await answered(client.stall, lambda told: JSONResponse({**shown, **told}), **shown)

    health = health_routes(client, stall_s=stall_s)
    return Starlette(
        middleware=[Middleware(AdminGuard, open_paths=[route.path for route in health])],
        routes=[
            *health,
            *dashboard_routes(client),
            Route("/metrics", show_metrics),
            Route("/reset_prefix_cache", reset_prefix_cache, methods=["POST"]),
            Route("/debug/explain/{request_id:path}", explain),
            Route("/debug/stall", stall),
        ],
    )
