"""Times what an open dashboard costs the engine: the same streams with a page that looks and without one, in turn.

Before: `blocktable bench dashboard`. After: one row. The page is the questions that it asks, as often as it asks them; that the
browser keeps up is the tests' to say. The map is checked before anything is timed.
"""

import argparse
import asyncio
import json
import threading
import time
from array import array
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from urllib.request import Request, urlopen

import numpy as np
from numpy.typing import NDArray

from ..errors import BlocktableError
from .command import count
from .row import Row, check
from .server_under_test import Server, counting_server
from .stream_client import ask_all, get

SUMMARY = """Look at a pool as the dashboard does: what that costs the engine's steps. Needs the extra `server`, and Linux.

An engine whose model takes --step-ms a step serves --clients streams, while a page is open and closed in turn, --seconds each.
  closed_step_ms, open_step_ms   from one step to the next, p50 of all steps; ratio_step_ms: open by closed
  engine_share                   CPU of the engine's process while the page is open less that while it is closed, by the time"""

TABLE = (
    "blocks", "clients", "step_ms", "map_every_ms", "closed_step_ms", "open_step_ms", "ratio_step_ms", "engine_share",
)  # fmt: skip

COMPLETIONS = "/v1/completions"
Span = tuple[int, int, float]
"""(from, to, in nanoseconds of the clock that the engine has too; CPU seconds of the engine)"""

STATE_EVERY_S = 1.0
"""As `dashboard.js` has it."""


def add_options(parser: argparse.ArgumentParser) -> None:
    """How large, how many, how long."""
    parser.add_argument("--blocks", type=count, default=100_000, help="of the pool (100k)")
    parser.add_argument("--clients", type=count, default=64, help="streams at once (64)")
    parser.add_argument("--step-ms", type=float, default=25.0, help="what a step of the counting model takes (25)")
    parser.add_argument("--seconds", type=float, default=3.0, help="that the page is open, or closed, at a time (3)")
    parser.add_argument("--rounds", type=count, default=8, help="of open and closed (8)")


def rows(options: argparse.Namespace) -> Iterator[Row]:
    """One row."""
    if options.smoke:
        options.blocks, options.clients, options.step_ms, options.seconds, options.rounds = 2000, 2, 5.0, 0.3, 1
    with TemporaryDirectory() as name:
        yield _row(options, Path(name))


def _row(options: argparse.Namespace, folder: Path) -> Row:
    from .counting_engine import MAX_MODEL_LEN, write_tokenizer

    write_tokenizer(folder)
    times_file = folder / "times"
    engine = {
        "num_blocks": options.blocks,
        "max_num_seqs": options.clients,
        "overlap_depth": 2,
        "drain_timeout_s": 0.5,
        "counting_step_ms": options.step_ms,
        "counting_times_file": str(times_file),
    }
    with counting_server(folder, engine) as server:
        every_s = json.loads(get(f"{server.admin_url}/dashboard/state"))["map_every_ms"] / 1000
        check(holds=len(_look(server, "blocks")) > options.blocks, what="the map has not a byte for each block")
        busy = threading.Thread(target=asyncio.run, args=[_stream_on(server, options.clients, MAX_MODEL_LEN - 8)], daemon=True)
        busy.start()
        time.sleep(options.seconds)
        spans = [_span(server, options.seconds, every_s if is_open else None) for is_open in [False, True] * options.rounds]
        check(holds=busy.is_alive(), what="the streams ended before the page was closed")
    began_ns = np.array(array("q", times_file.read_bytes()))
    row: Row = {"bench": "dashboard", "blocks": options.blocks, "clients": options.clients, "step_ms": options.step_ms}
    closed_ms, open_ms = (_step_ms(began_ns, spans[first::2]) for first in (0, 1))
    row |= {"map_every_ms": round(every_s * 1000), "closed_step_ms": closed_ms, "open_step_ms": open_ms}
    shares = [cpu_s / ((ended - begun) / 1e9) for begun, ended, cpu_s in spans]
    row["ratio_step_ms"] = round(open_ms / closed_ms, 4)
    row["engine_share"] = round(float(np.median(shares[1::2]) - np.median(shares[::2])), 4)
    return row


def _step_ms(began_ns: NDArray[np.int64], spans: list[Span]) -> float:
    """From one step to the next, p50 of all steps in these spans."""
    steps = [np.diff(began_ns[(began_ns >= begun) & (began_ns < ended)]) for begun, ended, _ in spans]
    return round(float(np.median(np.concatenate(steps))) / 1e6, 3)


def _span(server: Server, seconds: float, every_s: float | None) -> Span:
    """So long, with a page open if `every_s` says how often it wants a map."""
    begun, cpu = time.perf_counter_ns(), server.cpu()
    page = [] if every_s is None else [("blocks", every_s), ("state", STATE_EVERY_S)]
    ended = threading.Event()
    looking = [threading.Thread(target=_look_again, args=[server, path, every, ended]) for path, every in page]
    for thread in looking:
        thread.start()
    time.sleep(seconds)
    ended.set()
    for thread in looking:
        thread.join()
    return begun, time.perf_counter_ns(), (server.cpu() - cpu).engine_s


def _look_again(server: Server, path: str, every_s: float, ended: threading.Event) -> None:
    while not ended.is_set():
        begun = time.monotonic()
        _look(server, path)
        ended.wait(max(0.02, every_s - (time.monotonic() - begun)))


def _look(server: Server, path: str) -> bytes:
    with urlopen(Request(f"{server.admin_url}/dashboard/{path}"), timeout=60) as answer:
        told: bytes = answer.read()
        return told


async def _stream_on(server: Server, clients: int, output: int) -> None:
    bodies: list[dict[str, Any]] = [
        {"prompt": [place % 200], "max_tokens": output, "temperature": 0, "stream": True} for place in range(clients)
    ]
    with suppress(BlocktableError):  # they are broken off when all was seen
        await ask_all(server.url, COMPLETIONS, bodies, clients)
