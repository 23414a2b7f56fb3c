"""Partial hits: cached tokens are the full blocks and the longest common prefix in the block of divergence.

Before: prompts one after another in a pool that holds all. After: `num_cached_tokens` of each equals a brute-force count.
Calls of a recorded agent (LMCache/lmcache-agent-trace, Apache-2.0) are replayed: always the few of the excerpt in
`rust/core/tests/traces`, and all 402 if `BLOCKTABLE_TRACES` names the folder of `replay/lmcache_agent_miniswe.jsonl.zst`
and the program `zstd` is there.
"""

import gzip
import json
import os
import shutil
import subprocess
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from blocktable import Scheduler

BLOCK = 16
EXCERPT = Path(__file__).resolve().parents[2] / "rust/core/tests/traces/lmcache_agent_miniswe.excerpt.jsonl.gz"
Tokens = NDArray[np.int64]


def replay(prompts: Iterable[Tokens], num_blocks: int) -> tuple[list[int], list[int], int]:
    """Cached tokens of each prompt by the scheduler and by brute force, and how many of them were copied."""
    scheduler = Scheduler(
        num_blocks=num_blocks, block_size=BLOCK, vocab_size=2**31 - 1, max_model_len=2**20, max_num_seqs=1,
        max_num_batched_tokens=2**20, enable_partial_hits=True,
    )  # fmt: skip
    earlier: list[Tokens] = []
    ours, counted, in_parts = [], [], 0
    for prompt in prompts:
        request = scheduler.submit(prompt, max_tokens=1)
        plan = scheduler.plan(0)
        in_parts += int(plan.copies[:, 3].sum())
        scheduler.commit(plan.step, np.zeros(1, np.int64), np.array([0, 1]), 0)
        ours.append(scheduler.num_cached_tokens(request))
        counted.append(brute_force(earlier, prompt))
        earlier.append(prompt)
    scheduler.audit()
    return ours, counted, in_parts


def brute_force(earlier: list[Tokens], prompt: Tokens) -> int:
    """Full blocks, and the longest common prefix behind them with a full block of another, if it is a quarter of one."""
    most = len(prompt) - 1
    common = [min(most, common_prefix(other, prompt)) for other in earlier]
    full = max((length // BLOCK for length in common), default=0) * BLOCK
    parts = [length - full for length, other in zip(common, earlier, strict=True) if len(other) >= full + BLOCK]
    rows = max(parts, default=0)
    return full + (rows if rows * 4 >= BLOCK else 0)


def common_prefix(one: Tokens, other: Tokens) -> int:
    length = min(len(one), len(other))
    differs = np.flatnonzero(one[:length] != other[:length])
    return int(differs[0]) if len(differs) else length


def test_prompts_that_part_anywhere_reuse_what_brute_force_counts(seed: int) -> None:
    rng = np.random.default_rng(seed)
    prompts = [rng.integers(0, 1000, 400)]
    for _ in range(300):
        prompt = prompts[rng.integers(len(prompts))][: rng.integers(1, 400)]
        prompts.append(np.concatenate([prompt, rng.integers(0, 1000, rng.integers(1, 60))]))
    ours, counted, in_parts = replay(prompts, num_blocks=20_000)
    assert ours == counted
    assert in_parts > 300, "many prompts part inside a block"


def test_an_agents_first_calls_reuse_what_brute_force_counts() -> None:
    ours, counted, in_parts = replay(prompts_of(gzip.decompress(EXCERPT.read_bytes())), num_blocks=8_000)
    assert ours == counted
    assert len(ours) == 9
    assert in_parts > 0, "calls part inside a block"


@pytest.mark.timeout(600)
def test_an_agents_calls_reuse_what_brute_force_counts() -> None:
    path = Path(os.environ.get("BLOCKTABLE_TRACES", "traces")) / "replay" / "lmcache_agent_miniswe.jsonl.zst"
    if not path.exists() or shutil.which("zstd") is None:
        pytest.skip(f"{path} or zstd is not there")
    text = subprocess.run(["zstd", "-dcq", "--long=27", path], check=True, stdout=subprocess.PIPE).stdout
    prompts = prompts_of(text)
    ours, counted, in_parts = replay(prompts, num_blocks=400_000)
    assert ours == counted
    print(f"{len(ours)} calls: {sum(ours)} of {sum(map(len, prompts))} tokens are cached, {in_parts} of them copied")


def prompts_of(lines: bytes) -> list[Tokens]:
    """The prompt of each call. A token is four bytes of the text: the test is about prefixes, not about a vocabulary."""
    calls = [json.loads(line)["input"].encode() for line in lines.splitlines()]
    prompts = [np.frombuffer(call[: len(call) // 4 * 4], "<u4").astype(np.int64) % (2**31 - 1) for call in calls]
    return [prompt for prompt in prompts if len(prompt)]
