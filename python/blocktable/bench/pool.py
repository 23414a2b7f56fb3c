"""Times taking and releasing blocks, inside Rust.

Before: `blocktable bench pool`. After: one row per batch size, pool size and kind of content.
"""

import argparse
from collections.abc import Iterator
from functools import partial
from itertools import product

from .._core import bench_pool, bench_queue
from .clock import best_of
from .command import count
from .row import Row, read_peer_rows, with_peers

SUMMARY = """Take and release KV blocks: ns a block, and what a pool costs to make and to hold.

Runs inside Rust, by the wall clock, the best of three runs; with several threads the time of a block is wall time over the
blocks of all. `impl`: `ours` is the lock-free queue with its reference counts, `pool` all of the block pool with its index
(one thread), `mutex` a deque and counts behind a lock, `crossbeam` a bounded ring and counts (first in, first out; it cannot
take a block out of the middle, so no content). `content`: whether blocks carry published content when they are released."""

TABLE = (
    "batch", "blocks", "threads", "content", "impl", "ns_per_block", "init_ms", "first_pass_ms", "bytes_per_block",
    "peer", "peer_ns_per_block", "ratio_ns_per_block",
)  # fmt: skip

FIGURES = ("ns_per_block", "init_ms", "first_pass_ms", "bytes_per_block")

IMPLEMENTATIONS = ("ours", "pool", "mutex", "crossbeam")

SMALLEST_TIMED = 2_000_000
"""Blocks taken and released per row, at least: some 50 ms."""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Which rows."""
    parser.add_argument("--batch", type=count, nargs="+", default=[1, 32, 512], help="blocks taken at once (1 32 512)")
    parser.add_argument("--blocks", type=count, nargs="+", default=[10_000, 100_000, 1_000_000], help="pool sizes")
    parser.add_argument("--threads", type=count, nargs="+", default=[1, 2, 4], help="threads at once (1 2 4)")
    parser.add_argument("--impl", choices=IMPLEMENTATIONS, nargs="+", default=list(IMPLEMENTATIONS))
    parser.add_argument("--content", choices=["none", "published"], nargs="+", default=["none", "published"])


def rows(options: argparse.Namespace) -> Iterator[Row]:
    """One row per combination."""
    if options.smoke:
        options.batch, options.blocks, options.threads = [32], [10_000], [2]
    peers = read_peer_rows(options.peer_json)
    timed = 20_000 if options.smoke else SMALLEST_TIMED
    for blocks, content, threads, batch, implementation in product(
        options.blocks, options.content, options.threads, options.batch, options.impl
    ):
        if (implementation == "crossbeam" and content == "published") or (implementation == "pool" and threads > 1):
            continue
        row = _row(implementation, batch=batch, blocks=blocks, threads=threads, content=content, timed=timed)
        yield with_peers(row, peers, ["batch"], ["ns_per_block"]) if content == "none" and threads == 1 else row


def _row(implementation: str, *, batch: int, blocks: int, threads: int, content: str, timed: int) -> Row:
    sizes = {"num_blocks": blocks, "batch": batch, "rounds": max(2, timed // batch // threads)}
    published = content == "published"
    if implementation == "pool":
        figures = best_of(partial(bench_pool, **sizes, published=published))
    else:
        figures = best_of(partial(bench_queue, implementation=implementation, **sizes, published=published, threads=threads))
    keys: Row = {"bench": "pool", "batch": batch, "blocks": blocks, "threads": threads, "content": content}
    return keys | {"impl": implementation} | {name: figures[name] for name in FIGURES}
