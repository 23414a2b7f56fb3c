"""Times what a prompt costs on its way in: submit through Python, finding its cached prefix inside Rust, and forking it.

Before: `blocktable bench prefix`. After: one row per prompt length, cache state and pool.
"""

import argparse
from collections.abc import Iterator
from functools import cache, partial
from time import thread_time_ns
from typing import Any

import numpy as np

from .._core import BlockPool, BlockTable, Scheduler, bench_match
from .clock import Samples, best_of
from .command import count
from .load import BLOCK_SIZE, VOCAB_SIZE, Ids, run_to_end
from .row import Row, check, read_peer_rows, with_peers

SUMMARY = """Submit prompts, and match them against the prefix cache: us a prompt.

`add_us` is `Scheduler.submit` of a Python list and `add_array_us` of an int64 numpy array, both in thread CPU time;
`cached` says whether the prompt's content is in the cache then. `match_us` is match + pin + release of a prompt whose
keys are known, timed inside Rust by the wall clock (the best of three runs) on a pool that is `fresh` or `aged` (full
of cached content, its free queue shuffled).
`fork_us` is `BlockTable.fork` of a sequence of `tokens` tokens through Python, in thread CPU time: in a fresh pool the only
sequence there is, again and again; in an aged one, whose blocks lie shuffled, any of as many as fit. It does not depend on
`cached`."""


TABLE = (
    "tokens", "cached", "blocks", "pool", "add_us", "add_array_us", "match_us", "fork_us",
    "peer", "peer_add_us", "ratio_add_us",
)  # fmt: skip


def add_options(parser: argparse.ArgumentParser) -> None:
    """Which rows."""
    parser.add_argument("--tokens", type=count, nargs="+", default=[512, 8192, 32768], help="prompt lengths (512 8192 32768)")
    parser.add_argument("--blocks", type=count, nargs="+", default=[100_000, 1_000_000], help="pool sizes (100k 1M)")
    parser.add_argument("--cached", choices=["true", "false"], nargs="+", default=["true", "false"])
    parser.add_argument("--pool", choices=["fresh", "aged"], nargs="+", default=["fresh", "aged"])
    parser.add_argument("--rounds", type=count, default=200, help="prompts timed per row (200)")


def rows(options: argparse.Namespace) -> Iterator[Row]:
    """One row per combination. A submission is timed once per prompt length and cache state: no pool is touched by it."""
    if options.smoke:
        options.tokens, options.blocks, options.rounds = [512], [10_000], 20
    peers = [row | {"tokens": row.get("prompt")} for row in read_peer_rows(options.peer_json) if row.get("caching", True)]
    for tokens in options.tokens:
        fork_us = partial(cache(_fork_us), tokens=tokens, rounds=options.rounds)
        for cached in (text == "true" for text in options.cached):
            add_us, add_array_us = _time_submit(tokens, cached=cached, rounds=options.rounds)
            for blocks in options.blocks:
                for pool in options.pool:
                    aged = pool == "aged"
                    match_us = _match_us(num_blocks=blocks, tokens=tokens, cached=cached, aged=aged, rounds=options.rounds)
                    keys: Row = {"bench": "prefix", "tokens": tokens, "cached": cached, "blocks": blocks, "pool": pool}
                    row = keys | {"add_us": add_us, "add_array_us": add_array_us, "match_us": match_us}
                    row["fork_us"] = fork_us(num_blocks=blocks, aged=aged)
                    yield row if cached else with_peers(row, peers, ["tokens"], ["add_us"])


def _match_us(**case: Any) -> float:
    return best_of(partial(bench_match, **case))["match_us"]


def _time_submit(tokens: int, *, cached: bool, rounds: int) -> tuple[float, float]:
    """Median us of a submission from a list and from an array."""
    scheduler = Scheduler(
        num_blocks=2 * (tokens // BLOCK_SIZE + 2) + 1,
        block_size=BLOCK_SIZE,
        vocab_size=VOCAB_SIZE,
        max_model_len=tokens + 1,
        max_num_seqs=1,
        max_num_batched_tokens=8192,
    )
    rng = np.random.default_rng(0)
    prompts = rng.integers(0, VOCAB_SIZE, (1 if cached else rounds + 1, tokens))
    _check_cache(scheduler, prompts[0], cached=cached)
    as_list, as_array = np.empty(rounds, np.int64), np.empty(rounds, np.int64)
    for i in range(rounds):
        prompt = prompts[0 if cached else i + 1]
        _submit_once(scheduler, prompt.tolist(), as_list, i)
        _submit_once(scheduler, prompt, as_array, i)
    return round(float(np.median(as_list)) / 1000, 3), round(float(np.median(as_array)) / 1000, 3)


def _submit_once(scheduler: Scheduler, prompt: list[int] | Ids, into: Samples, i: int) -> None:
    start = thread_time_ns()
    request = scheduler.submit(prompt, max_tokens=1)
    into[i] = thread_time_ns() - start
    scheduler.abort(request)


def _check_cache(scheduler: Scheduler, prompt: Ids, *, cached: bool) -> None:
    """Run the prompt once so that it is cached; a second run finds all but its last block."""
    run_to_end(scheduler, scheduler.submit(prompt, max_tokens=1))
    again = scheduler.submit(prompt, max_tokens=1)
    run_to_end(scheduler, again)
    found = scheduler.num_cached_tokens(again)
    expected = (len(prompt) - 1) // BLOCK_SIZE * BLOCK_SIZE
    check(holds=found == expected, what=f"{expected} of {len(prompt)} tokens are cached, found {found}")
    if not cached:
        scheduler.reset_prefix_cache()


def _fork_us(*, num_blocks: int, tokens: int, aged: bool, rounds: int) -> float:
    """Median us of a fork of one sequence of `tokens` tokens."""
    rng = np.random.default_rng(0)
    pool = BlockPool(num_blocks, BLOCK_SIZE)
    if aged:
        _shuffle(pool, rng)
    tables = [pool.table() for _ in range(pool.num_free // -(-tokens // BLOCK_SIZE) if aged else 1)]
    for table in tables:
        table.append(tokens)
    _check_fork(pool, tables[0])
    samples = np.empty(rounds, np.int64)
    for i, place in enumerate(rng.integers(0, len(tables), rounds).tolist()):
        parent = tables[place]
        start = thread_time_ns()
        child = parent.fork()
        samples[i] = thread_time_ns() - start
        child.release()
    pool.audit()
    return round(float(np.median(samples)) / 1000, 3)


def _shuffle(pool: BlockPool, rng: np.random.Generator) -> None:
    """Neighbours in the free queue become strangers in memory."""
    pool.release(rng.permutation(pool.take(pool.num_free)))
    near = float(np.mean(np.abs(np.diff(pool.free_queue())) <= 4))
    check(holds=near < 0.3, what=f"an aged pool's queue is shuffled, {near:.0%} of its neighbours lie side by side")


def _check_fork(pool: BlockPool, parent: BlockTable) -> None:
    """A fork names its parent's blocks, holds each once more, and gives them back; it takes none."""
    refs, free = pool.block_refs(), pool.num_free
    with parent.fork() as child:
        same = np.array_equal(child.slots(), parent.slots())
        held = pool.block_refs() - refs
    shared = np.bincount(parent.blocks, minlength=len(refs))
    check(holds=same and np.array_equal(held, shared), what="a fork holds every block of its parent once more")
    back = np.array_equal(pool.block_refs(), refs) and pool.num_free == free
    check(holds=back, what="a fork that is released leaves its parent as it was")
