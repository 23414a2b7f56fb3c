"""`blocktable top`: what a running server is doing, in a terminal.

Before: the admin port of `blocktable serve`. After: a screen that is painted again every second, or once with `--once`. What it
shows is what the dashboard shows: the pool as a map, steps, queue, requests.
"""

from __future__ import annotations

import argparse
import http.client
import json
import shutil
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..server.packed_map import USES, BlockMap, unpack

DESCRIPTION = "Show what a server is doing: its block pool, its steps, its queue, its requests. Reads the admin port."

DEFAULT_URL = "http://127.0.0.1:8001"

PATIENCE_S = 10.0

LONGEST_S = 86_400.0
"""Seconds between two looks, at most."""

LETTERS = " .c#%P~"
"""A use's character where there are no colours, by the core's numbers."""

COLOURS = (90, 37, 36, 34, 35, 33, 31)
"""The same as colours of a terminal."""

MAP_ROWS = 12


class NoAnswerError(Exception):
    """The server cannot be asked."""


class NoEngineError(NoAnswerError):
    """The server answers, and its engine does not: it starts, is started again, drains, or hangs. The text says which."""


@dataclass(frozen=True, slots=True)
class Look:
    """What the server said at one moment."""

    state: Mapping[str, Any]
    block_map: BlockMap
    requests: Sequence[Mapping[str, Any]]

    @classmethod
    def at(cls, url: str) -> Look:
        """Ask it. Raises `NoAnswerError`; `NoEngineError` if it may be otherwise at the next look."""
        state, told, blocks = (_get(f"{url}/{path}") for path in ("dashboard/state", "debug/stall", "dashboard/blocks"))
        try:
            return cls(json.loads(state), unpack(blocks), json.loads(told)["waiting"])
        except (ValueError, LookupError, TypeError) as error:
            raise NoAnswerError(f"{url}: answers, but not as the admin port does: {error}") from None


def add_options(parser: argparse.ArgumentParser) -> None:
    """The options of the subcommand."""
    parser.add_argument("--url", default=DEFAULT_URL, help=f"the admin port of a server (default: {DEFAULT_URL})")
    parser.add_argument("--every", type=float, default=1.0, metavar="SECONDS", help="time between two looks (default: 1)")
    parser.add_argument("--once", action="store_true", help="look twice, print once, end")


def run(options: argparse.Namespace) -> int:
    """Look and paint until interrupted; returns the exit code."""
    url, before, has_colours = options.url.rstrip("/"), None, sys.stdout.isatty()
    try:
        while True:
            try:
                now = Look.at(url)
            except NoEngineError as error:
                if options.once:
                    raise
                _show([_cut(printable(str(error)), shutil.get_terminal_size().columns)], clears=has_colours)
                before = None
                _rest(options.every)
                continue
            if before is not None or not options.once:
                size = shutil.get_terminal_size()
                lines = list(paint(now, before, width=size.columns, height=size.lines, has_colours=has_colours))
                _show(lines, clears=has_colours and not options.once)
            if before is not None and options.once:
                return 0
            before = now
            _rest(options.every)
    except NoAnswerError as error:
        print(f"blocktable: error: {error}", file=sys.stderr)
        return 2


def paint(now: Look, before: Look | None, *, width: int, height: int, has_colours: bool) -> Iterator[str]:
    """The lines of a screen. Figures for a time are those since `before`."""
    state, stats = now.state, now.state["stats"]
    yield _cut(f"{state['model']}  {state['state']}  {state['num_blocks']:,} blocks of {state['block_size']} tokens", width)
    counts = np.bincount(np.frombuffer(now.block_map.uses, np.uint8), minlength=len(USES))
    yield _cut("  ".join(f"{name} {count:,}" for name, count in list(zip(USES, counts.tolist()))[1:]), width)
    yield from map_rows(now.block_map.uses, columns=width, rows=min(MAP_ROWS, max(1, height - 8)), has_colours=has_colours)
    yield _cut("  ".join((f"running {stats['running']}", f"waiting {stats['waiting']}", *_rates(state, before))), width)
    yield ""
    yield _cut(f"{'request':<36}  {'place':<10}  waits for", width)
    for request in now.requests[: max(0, height - MAP_ROWS - 6)]:
        waits = request["waits_for"] or ""
        yield _cut(f"{printable(request['request_id']):<36}  {request['place']:<10}  {printable(str(waits))}", width)


def map_rows(uses: bytes, *, columns: int, rows: int, has_colours: bool) -> Iterator[str]:
    """The pool in so many cells at most, each the commonest use of equally many blocks."""
    each = max(1, -(-len(uses) // (columns * rows)))
    padded = np.frombuffer(uses, np.uint8)
    padded = np.concatenate((padded, np.full(-len(padded) % each, padded[-1], np.uint8))).reshape(-1, each)
    commonest = np.stack([(padded == use).sum(axis=1) for use in range(len(USES))]).argmax(axis=0).tolist()
    for start in range(0, len(commonest), columns):
        cells = commonest[start : start + columns]
        if has_colours:
            yield "".join(f"\x1b[{COLOURS[use]}m\N{FULL BLOCK}" for use in cells) + "\x1b[0m"
        else:
            yield "".join(LETTERS[use] for use in cells)


def printable(text: str) -> str:
    """Without what could steer a terminal: clients choose some of these texts."""
    return "".join(letter if letter.isprintable() else "?" for letter in text)


def _show(lines: Sequence[str], *, clears: bool) -> None:
    print(("\x1b[H\x1b[2J" if clears else "") + "\n".join(lines), flush=True)


def _rest(seconds: float) -> None:
    time.sleep(min(max(0.05, seconds), LONGEST_S))


def _rates(now: Mapping[str, Any], before: Look | None) -> Iterator[str]:
    if before is None or before.state["started_s"] != now["started_s"]:
        return
    past, seconds = before.state, now["now_s"] - before.state["now_s"]
    steps = now["stats"]["steps"] - past["stats"]["steps"]
    tokens = now["stats"]["scheduled_tokens"] - past["stats"]["scheduled_tokens"]
    yield f"steps/s {steps / seconds:.1f}"
    if steps:
        yield f"scheduler {(now['scheduler_cpu_ns'] - past['scheduler_cpu_ns']) / steps / 1e3:.0f} us a step"
        yield f"step {(now['steps_ns'] - past['steps_ns']) / steps / 1e6:.1f} ms"
    yield f"tokens/s {tokens / seconds:.0f}"


def _get(url: str) -> bytes:
    try:
        with urllib.request.urlopen(url, timeout=PATIENCE_S) as answer:
            read: bytes = answer.read()
            return read
    except urllib.error.HTTPError as error:
        if error.code == 503:
            raise NoEngineError(f"{url}: {_words(error)}") from error
        raise NoAnswerError(f"{url}: {error.reason}") from error
    except (OSError, http.client.HTTPException, ValueError) as error:
        raise NoAnswerError(f"{url}: {getattr(error, 'reason', error)}") from error


def _words(refusal: urllib.error.HTTPError) -> str:
    """The state, where it is told, and what was said of it."""
    try:
        told = json.loads(refusal.read())
        return ": ".join(str(told[name]) for name in ("state", "error") if name in told)
    except (OSError, http.client.HTTPException, ValueError, TypeError):
        return str(refusal.reason)


def _cut(line: str, width: int) -> str:
    return line[:width]
