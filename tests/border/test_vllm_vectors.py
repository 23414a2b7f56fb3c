"""The recorded scripts of vLLM 0.32's KV cache manager come out the same through `BlockPool`, `BlockTable` and `PrefixCache`.

Before: the file that `rust/core/tests/suite/vllm_vectors.rs` plays too. After each call hits, tables, the order of the free
queue and the set of published blocks are equal, refused calls included. vLLM names a full block as soon as it is allocated, so
each is published at once.
"""

import gzip
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from blocktable import BlockPool, BlockTable, OutOfBlocksError, PrefixCache, _core

FILE = Path(__file__).resolve().parents[2] / "rust/core/tests/vectors/vllm_kv_manager.jsonl.gz"


def scripts() -> list[dict[str, Any]]:
    with gzip.open(FILE, "rt", encoding="utf-8") as lines:
        return [json.loads(line) for line in lines]


class Replay:
    """One script being played."""

    def __init__(self, script: dict[str, Any]) -> None:
        self.pool = BlockPool(script["blocks"], script["block_size"])
        self.cache = PrefixCache(self.pool)
        self.has_caching = script["caching"]
        self.live: dict[int, tuple[BlockTable, list[int]]] = {}

    def apply(self, op: dict[str, Any]) -> str:
        """Does one call; what it was, for the count."""
        try:
            return getattr(self, op["op"])(op)
        except OutOfBlocksError:
            assert op.get("refused"), f"ours is refused, vLLM's was not: {op}"
            return f"{op['op']} refused"

    def start(self, op: dict[str, Any]) -> str:
        tokens = op["tokens"]
        if self.has_caching:
            table, hit = self.cache.match(tokens, reserve=len(tokens))
        else:
            table, hit = self.pool.table(), 0
        table.append(len(tokens) - hit)
        self.publish(table, tokens)
        assert (hit, table.blocks.tolist()) == (op.get("hit_tokens"), op.get("table"))
        self.live[op["id"]] = table, list(tokens)
        return "start with a hit" if hit else "start"

    def append(self, op: dict[str, Any]) -> str:
        table, tokens = self.live[op["id"]]
        table.append(len(op["tokens"]))
        tokens += op["tokens"]
        self.publish(table, tokens)
        assert table.blocks.tolist() == op["table"]
        return "append"

    def free(self, op: dict[str, Any]) -> str:
        self.live.pop(op["id"])[0].release()
        return "free"

    def publish(self, table: BlockTable, tokens: list[int]) -> None:
        if self.has_caching:
            start = table.num_published * self.pool.block_size
            self.cache.publish(table, tokens[start:], start=start)

    def compare(self, op: dict[str, Any]) -> None:
        assert self.pool.free_queue().tolist() == op["free_queue"]
        assert self.pool.published_blocks().tolist() == op["cached"]
        self.pool.audit()


def play(every: int) -> Counter[str]:
    met: Counter[str] = Counter()
    for script in scripts()[::every]:
        replay = Replay(script)
        for op in script["ops"]:
            met[replay.apply(op)] += 1
            replay.compare(op)
    return met


def test_the_recorded_scripts_of_vllm_come_out_the_same():
    met = play(every=2)
    assert set(met) == {"start", "start with a hit", "start refused", "append", "append refused", "free"}
    assert min(met.values()) >= 50, met


@pytest.mark.mutant
@pytest.mark.parametrize(
    "mutant", ["unpublished_to_tail", "head_order", "forward_order", "free_queue_skips_one", "hit_whole_prompt"]
)
def test_another_order_does_not_come_out_the_same(mutant):
    _core.set_mutant(mutant)
    try:
        with pytest.raises(AssertionError):
            play(every=10)
    finally:
        _core.set_mutant(None)
