"""Times taking and releasing blocks, inside Rust.

Before: `blocktable bench pool`. After: one row per batch size, pool size and kind of content.
"""

import argparse
from collections.abc import Iterator
from functools import partial

from .._core import bench_pool
from .clock import best_of
from .command import count
from .row import Row, read_peer_rows, with_peers

SUMMARY = """Take and release KV blocks: ns a block, and what a pool costs to make and to hold.

Runs inside Rust, one thread, by the wall clock; the best of three runs. `content`: whether the blocks carry published
content when they are released (it is forgotten as they are taken again)."""

TABLE = (
    "batch", "blocks", "threads", "content", "impl", "ns_per_block", "init_ms", "first_pass_ms", "bytes_per_block",
    "peer", "peer_ns_per_block", "ratio_ns_per_block",
)  # fmt: skip

FIGURES = ("ns_per_block", "init_ms", "first_pass_ms", "bytes_per_block")

SMALLEST_TIMED = 2_000_000
"""Blocks taken and released per row, at least: some 50 ms."""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Which rows."""
    parser.add_argument("--batch", type=count, nargs="+", default=[1, 32, 512], help="blocks taken at once (1 32 512)")
    parser.add_argument("--blocks", type=count, nargs="+", default=[10_000, 100_000, 1_000_000], help="pool sizes")
    parser.add_argument("--content", choices=["none", "published"], nargs="+", default=["none", "published"])


def rows(options: argparse.Namespace) -> Iterator[Row]:
    """One row per combination."""
    if options.smoke:
        options.batch, options.blocks = [32], [10_000]
    peers = read_peer_rows(options.peer_json)
    timed = 20_000 if options.smoke else SMALLEST_TIMED
    for blocks in options.blocks:
        for content in options.content:
            for batch in options.batch:
                row = _row(batch=batch, blocks=blocks, content=content, timed=timed)
                yield with_peers(row, peers, ["batch"], ["ns_per_block"]) if content == "none" else row


def _row(*, batch: int, blocks: int, content: str, timed: int) -> Row:
    published, rounds = content == "published", max(2, timed // batch)
    figures = best_of(partial(bench_pool, num_blocks=blocks, batch=batch, published=published, rounds=rounds))
    keys: Row = {"bench": "pool", "batch": batch, "blocks": blocks, "threads": 1, "content": content, "impl": "ours"}
    return keys | {name: figures[name] for name in FIGURES}
