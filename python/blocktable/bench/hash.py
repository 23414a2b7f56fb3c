"""Times the chained hash of a full block, inside Rust.

Before: `blocktable bench hash`. After: one row per algorithm; `default` marks the one that a `Scheduler` uses.
"""

import argparse
from collections.abc import Iterator
from functools import partial

from .._core import BlockHasher, bench_hash
from .clock import best_of
from .row import Row, check, read_peer_rows, with_peers

SUMMARY = """Hash 16-token blocks, each key depending on the one before: ns a block.

Runs inside Rust, one thread, by the wall clock; the best of fifty runs."""

TABLE = ("algorithm", "default", "ns_per_block", "tokens_per_s", "peer", "peer_ns_per_block", "ratio_ns_per_block")

ALGORITHMS = ("blake3", "sha256", "sha256_cbor", "vllm_sha256")
BLOCK_SIZE = 16


def add_options(parser: argparse.ArgumentParser) -> None:
    """Which rows."""
    parser.add_argument("--algorithm", choices=ALGORITHMS, nargs="+", default=list(ALGORITHMS))


def rows(options: argparse.Namespace) -> Iterator[Row]:
    """One row per algorithm."""
    blocks, times = (1_000, 2) if options.smoke else (20_000, 50)  # each run short enough to be left alone by others
    for algorithm in options.algorithm:
        _check_chain(algorithm)
        ns = best_of(partial(bench_hash, algorithm=algorithm, blocks=blocks), times=times)["ns_per_block"]
        row: Row = {"bench": "hash", "algorithm": algorithm, "default": is_default(algorithm)}
        row |= {"ns_per_block": ns, "tokens_per_s": BLOCK_SIZE * 1e9 / ns}
        yield with_peers(row, read_peer_rows(options.peer_json), ["algorithm"], ["ns_per_block"])


def is_default(algorithm: str) -> bool:
    """Whether a hasher that names no algorithm gives the keys of this one."""
    tokens = list(range(16))
    return BlockHasher(block_size=16).keys(tokens) == BlockHasher(block_size=16, algorithm=algorithm).keys(tokens)


def _check_chain(algorithm: str) -> None:
    """A key covers its block and all before it, and nothing behind it."""
    hasher = BlockHasher(block_size=16, algorithm=algorithm)
    tokens = list(range(48))
    keys = hasher.keys(tokens)
    changed = hasher.keys([tokens[0] + 1, *tokens[1:]])
    check(holds=[len(key) for key in keys] == [32, 32, 32], what=f"{algorithm} gives 32 bytes for each full block")
    check(holds=hasher.keys(tokens[:40]) == keys[:2], what=f"{algorithm} keys of a shorter chain are those of the longer")
    check(holds=not set(keys) & set(changed), what=f"every {algorithm} key of a chain depends on its first token")
