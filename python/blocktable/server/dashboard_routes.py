"""The dashboard: a page on the admin port that shows the block pool as it is, the last minutes' steps, a request's timeline.

Before: an operator's browser, or `blocktable top`. After: an `EngineClient`, asked at most so often that the engine does not
notice. Always: files come from `dashboard/` of this package, listed when the routes are made; nothing is taken from elsewhere,
and the page's own policy lets the browser ask nobody else.

| route | what |
|---|---|
| `/dashboard` | the page; its files lie behind it |
| `/dashboard/blocks` | what every block is doing: see `packed_map.py` |
| `/dashboard/state` | the figures of the graphs |
| `/debug/block/{block}` | whose tables name a block |
"""

from __future__ import annotations

import mimetypes
import re
import zlib
from pathlib import Path, PurePath
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Route

from .asking import answered
from .engine_client import EngineClient
from .packed_map import BlockMap, pack

FILES = Path(__file__).parent / "dashboard"

POLICY = "default-src 'self'; frame-ancestors 'none'; base-uri 'none'"
"""What the page may load: its own files, and nobody may frame it."""

NUMBER = re.compile(r"[0-9]{1,10}")
"""Of a block, as far as it is worth asking for."""

MAP_EVERY_MS = 250
MAP_US_PER_BLOCK = 1.5
"""Milliseconds between two maps, and microseconds for each block of the pool if that is more: making one takes some 4 to 7 ns a
block, so that the engine spends under half a percent on it."""


def map_every_ms(num_blocks: int) -> int:
    """Milliseconds between two maps of a pool."""
    return max(MAP_EVERY_MS, round(num_blocks * MAP_US_PER_BLOCK / 1000))


def dashboard_routes(client: EngineClient) -> list[BaseRoute]:
    """The routes, for the app on the admin port."""

    async def page(_: Request) -> Response:
        return _file(FILES / "index.html")

    async def blocks(request: Request) -> Response:
        def show(block_map: BlockMap) -> Response:
            packed = pack(block_map)
            if "gzip" not in request.headers.get("accept-encoding", ""):
                return Response(packed, media_type="application/octet-stream")
            # Maps are long runs of few values: the lowest level makes them some twenty times smaller.
            squeezed = zlib.compressobj(1, wbits=zlib.MAX_WBITS | 16)
            body = squeezed.compress(packed) + squeezed.flush()
            return Response(body, media_type="application/octet-stream", headers={"Content-Encoding": "gzip"})

        return await answered(client.block_map, show)

    async def state(_: Request) -> Response:
        shown = {"state": client.state.value}
        return await answered(client.snapshot, lambda snapshot: JSONResponse(shown | _figures(client, snapshot)), **shown)

    async def block(request: Request) -> Response:
        text = request.path_params["block"]
        if not NUMBER.fullmatch(text):
            return JSONResponse({"error": f"block={text[:100]!r}: must be a number of at most 10 digits"}, 404)
        return await answered(lambda: client.block_namings(int(text)), lambda found: JSONResponse({"namings": found}))

    files = [Route(f"/dashboard/{path.name}", _serve(path)) for path in sorted(FILES.iterdir()) if path.suffix != ".html"]
    return [
        Route("/dashboard", page),
        *files,
        Route("/dashboard/blocks", blocks),
        Route("/dashboard/state", state),
        Route("/debug/block/{block}", block),
    ]


def _figures(client: EngineClient, snapshot: dict[str, Any]) -> dict[str, Any]:
    info = client.info
    path = PurePath(info.model)
    return {
        "model": path.name if path.is_absolute() else info.model,
        "num_blocks": info.num_blocks,
        "block_size": info.block_size,
        "map_every_ms": map_every_ms(info.num_blocks),
        "stats": snapshot["stats"],
        "scheduler_cpu_ns": snapshot["scheduler_cpu_ns"],
        "steps_ns": sum(snapshot["phases_ns"].values()),
        "started_s": snapshot["started_s"],
        "now_s": snapshot["now_s"],
    }


def _serve(path: Path) -> Any:
    async def serve(_: Request) -> Response:
        return _file(path)

    return serve


def _file(path: Path) -> Response:
    kind, _ = mimetypes.guess_type(path.name)
    headers = {"Content-Security-Policy": POLICY, "X-Content-Type-Options": "nosniff", "Cache-Control": "no-cache"}
    return Response(path.read_bytes(), media_type=kind, headers=headers)
