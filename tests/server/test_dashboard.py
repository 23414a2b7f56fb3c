"""The dashboard in a real browser: the map is the pool's, the pointer tells whose a block is, timelines and graphs move."""

import asyncio
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import httpx
import numpy as np
import pytest
import uvicorn
from starlette.applications import Starlette

from blocktable import _core
from blocktable.errors import EngineDeadError, NoSuchBlockError
from blocktable.server.dashboard_routes import FILES, dashboard_routes, map_every_ms
from blocktable.server.engine_client import EngineState
from blocktable.server.packed_map import BlockMap, pack, unpack
from tests.server.browser import CHROMIUM, Browser

needs_browser = pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium, which is not installed here")

NUM_BLOCKS = 100_000


class FakeClient:
    """An engine with a pool of 100,000 blocks in which the held part grows with each look."""

    def __init__(self) -> None:
        self.state = EngineState.READY
        self.info = SimpleNamespace(model="<b>tiny</b>", num_blocks=NUM_BLOCKS, block_size=16)
        self.looks = 0
        self.asked: list[int] = []

    async def block_map(self) -> BlockMap:
        self.looks += 1
        uses, tenants = np.full(NUM_BLOCKS, 1, np.uint8), np.zeros(NUM_BLOCKS, np.uint8)
        uses[0], uses[1 : 1 + 1000 * self.looks], tenants[1 : 1 + 1000 * self.looks] = 0, 3, 1
        return BlockMap(uses.tobytes(), tenants.tobytes(), ["<i>team</i>"])

    async def block_namings(self, block: int) -> list[dict[str, Any]]:
        if block >= NUM_BLOCKS:
            raise NoSuchBlockError(block, NUM_BLOCKS)
        self.asked.append(block)
        return [{"request_id": "cmpl-<u>7</u>", "group": 0, "index": 2}]

    async def snapshot(self) -> dict[str, Any]:
        steps = 10 * self.looks
        stats = {"steps": steps, "running": 3, "waiting": 2, "scheduled_tokens": 640 * self.looks}
        times = {"scheduler_cpu_ns": steps * 50_000, "phases_ns": {"plan": steps * 1_000_000, "model": steps * 9_000_000}}
        return {"stats": stats, **times, "started_s": 1.0, "now_s": asyncio.get_running_loop().time()}


@pytest.fixture
def client() -> FakeClient:
    return FakeClient()


@pytest.fixture
def url(client: FakeClient) -> Iterator[str]:
    """A server of the dashboard's routes on a free port."""
    from starlette.responses import JSONResponse
    from starlette.routing import Route

    async def stall(_: Any) -> JSONResponse:
        return JSONResponse({"waiting": [{"request_id": "cmpl-<u>7</u>", "place": "running", "waits_for": None}], "stack": []})

    async def explain(request: Any) -> JSONResponse:
        return JSONResponse({"text": f"timeline of {request.path_params['request_id']}"})

    routes = [
        *dashboard_routes(client),  # type: ignore[arg-type]
        Route("/debug/stall", stall),
        Route("/debug/explain/{request_id:path}", explain),
    ]
    server = uvicorn.Server(uvicorn.Config(Starlette(routes=routes), port=0, log_level="error", lifespan="off"))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        assert thread.is_alive()
        threading.Event().wait(0.01)
    yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    server.should_exit = True
    thread.join(10)


@needs_browser
def test_the_page_paints_the_pool_and_tells_of_a_block(client: FakeClient, url: str) -> None:
    with Browser() as page:
        page.open(f"{url}/dashboard")
        page.wait_for("window.blocktable && blocktable.map.frames >= 3")
        counts = page.read("blocktable.map.legend()")
        assert {name for name, _, _ in counts} == {"null", "free", "held"}
        assert sum(count for _, _, count in counts) == NUM_BLOCKS
        # The colour of the cell in the middle of the first row is that of held blocks.
        held = page.read("blocktable.map.legend().find(([name]) => name === 'held')[1]")
        assert page.read(COLOUR_OF.format(block=5)) == held
        assert page.read(COLOUR_OF.format(block=NUM_BLOCKS - 5)) != held
        x, y = page.read(PLACE_OF.format(block=5))
        page.move_mouse(x, y)
        assert page.wait_for("document.getElementById('tip').textContent.includes('tokens 32 to 47') && tip.textContent")
        shown = page.read("document.getElementById('tip').textContent")
        assert shown.startswith("block 5: held, of <i>team</i>\ncmpl-<u>7</u>: entry 2, tokens 32 to 47")
        assert client.asked == [5]
        assert page.errors == []


@needs_browser
def test_what_clients_choose_is_shown_as_text(url: str) -> None:
    with Browser() as page:
        page.open(f"{url}/dashboard")
        page.wait_for("document.getElementById('model').textContent.includes('<b>tiny</b>')")
        page.wait_for("document.querySelector('#requests a') !== null")
        page.read("document.getElementById('paint').value = 'tenant'; paint.dispatchEvent(new Event('change'))")
        page.wait_for("legend.textContent.includes('<i>team</i>')")
        page.read("document.querySelector('#requests a').click()")
        page.wait_for("timeline.textContent === 'timeline of cmpl-<u>7</u>'")
        assert page.read("document.querySelectorAll('b, i:not(#legend i), u').length") == 0
        assert page.errors == []


@needs_browser
def test_it_makes_four_frames_a_second_with_100_000_blocks_and_graphs_move(client: FakeClient, url: str) -> None:
    with Browser() as page:
        page.open(f"{url}/dashboard")
        page.wait_for("window.blocktable && blocktable.map.frames > 0")
        before = page.read("[blocktable.map.frames, performance.now()]")
        page.wait_for("document.getElementById('cpu-now').textContent === '50 µs'")
        page.wait_for("document.getElementById('step-now').textContent === '10.0 ms'")
        assert page.read("document.getElementById('queue-now').textContent") == "3 run, 2 wait"
        page.wait_for(f"blocktable.map.frames >= {before[0]} + 8")
        drawn = page.read("(() => { const t = performance.now(); for (let i = 0; i < 5; i++) blocktable.map.draw(); "
                          "return (performance.now() - t) / 5; })()")  # fmt: skip
        print(f"a frame of {NUM_BLOCKS} blocks is painted in {drawn:.1f} ms")
        assert page.errors == []


@needs_browser
def test_an_engine_that_does_not_answer_is_said_and_comes_back(client: FakeClient, url: str) -> None:
    async def dead() -> BlockMap:
        raise EngineDeadError("it was killed")

    whole = client.block_map
    with Browser() as page:
        page.open(f"{url}/dashboard")
        page.wait_for("window.blocktable && blocktable.map.frames > 0")
        client.block_map, client.state = dead, EngineState.DEAD  # type: ignore[method-assign]
        page.wait_for(
            "trouble.textContent.includes('it was killed') && document.getElementById('state').textContent === 'dead'"
        )
        client.block_map, client.state = whole, EngineState.READY  # type: ignore[method-assign]
        frames = page.read("blocktable.map.frames")
        page.wait_for(f"blocktable.map.frames > {frames} + 2 && trouble.textContent === ''")


def test_a_map_travels_whole_and_anything_else_is_refused() -> None:
    block_map = BlockMap(bytes([0, 1, 3]), bytes([0, 0, 1]), ["a \u00e4"])
    assert unpack(pack(block_map)) == block_map
    for broken in (b"", pack(block_map)[:-1], pack(block_map) + b"x"):
        with pytest.raises(ValueError, match="no map"):
            unpack(broken)


@pytest.mark.parametrize(
    ("number", "status"), [("5", 200), ("99999999999", 404), ("9" * 5000, 404), ("x", 404), (str(NUM_BLOCKS), 404)]
)
def test_a_block_that_there_cannot_be_is_not_found(number: str, status: int, client: FakeClient, url: str) -> None:
    assert httpx.get(f"{url}/debug/block/{number}", trust_env=False).status_code == status
    assert client.asked == ([5] if status == 200 else [])


def test_a_large_pool_is_looked_at_less_often() -> None:
    assert [map_every_ms(count) for count in (100, 100_000, 1_000_000)] == [250, 250, 1500]


def test_the_page_names_every_use_of_the_core() -> None:
    assert '["null", "free", "free, cached", "held", "shared", "pinned", "parked"]' in (FILES / "block_map.js").read_text()
    uses, _, _ = _core.Scheduler(num_blocks=4, block_size=4, vocab_size=9, max_model_len=8).block_map()
    assert uses.tolist() == [0, 1, 1, 1]


COLOUR_OF = """(() => {{
  const m = blocktable.map, g = m.grid;
  const [r, gr, b] = m.image.getContext('2d').getImageData({block} % g.columns, Math.floor({block} / g.columns), 1, 1).data;
  return '#' + [r, gr, b].map((part) => part.toString(16).padStart(2, '0')).join('');
}})()"""

PLACE_OF = """(() => {{
  const m = blocktable.map, g = m.grid, box = m.canvas.getBoundingClientRect();
  const at = [{block} % g.columns + 0.5, Math.floor({block} / g.columns) + 0.5];
  return [box.left + at[0] / g.columns * box.width, box.top + at[1] / g.rows * box.height];
}})()"""
