"""Promise: for every architecture of `tests/model/tiny.py`, greedy text equals transformers' `generate`, token for token, in
every way of running the engine. Windows are shorter than the prompts; see `tiny.py` for what else these models have.

16 prompts, 24 tokens each; one tie at most in each way (see `reference.py`). Alone, every fourth of them runs outside a soak.
"""

import random
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

from tests.model.tiny import ARCHITECTURES, VOCAB_SIZE

from .reference import Comparison, Ids, generate_reference, is_tie
from .ways import Way, in_the_middle, one_by_one, run_way, warm

pytestmark = pytest.mark.usefixtures("one_torch_thread")

NUM_TOKENS = 24
MAX_TIES = 1
LENGTHS = (1, 2, 3, 5, 7, 8, 9, 11, 13, 15, 17, 20, 23, 26, 33, 40)
SHARED = 25
"""Tokens that the two longest prompts have in common."""
BASE = {"num_blocks": 160, "block_size": 8, "max_num_seqs": 16, "max_num_batched_tokens": 256, "self_check": False}

WAYS = {
    "default": Way(),
    "blocks of 1": Way({"block_size": 1, "num_blocks": 1000}),
    "blocks of 7": Way({"block_size": 7}),
    "blocks of 16": Way({"block_size": 16}),
    "blocks of 32": Way({"block_size": 32}),
    "8 tokens a step": Way({"max_num_batched_tokens": 8}),
    "tiny pool": Way({"block_size": 1, "num_blocks": 91, "estimate_growth": False}, min_preemptions=20),
    "warm prefix cache": Way(arrive=warm, is_warm=True),
    "one by one": Way(arrive=one_by_one, stride=4),
    "arrivals in the middle": Way(arrive=in_the_middle),
}

ALL_WINDOWS = Way({"block_size": 8, "num_blocks": 8, "max_num_batched_tokens": 24}, times=2)
SOME_WINDOWS = Way({"block_size": 4, "num_blocks": 22, "max_num_batched_tokens": 16}, times=2)
TINY_POOLS = {
    **dict.fromkeys(("mistral", "phi3", "mixtral"), ALL_WINDOWS),
    **dict.fromkeys(("qwen2", "gemma2", "gemma3_text", "gpt_oss"), SOME_WINDOWS),
}
"""Of models with windows, where what leaves a window makes room for others: pools smaller still, and every prompt twice. A
window lies in two blocks in one step and in three in the next, so that a sequence takes blocks again and again."""


def test_the_architectures_are_those_that_are_promised() -> None:
    promised = "gpt2 llama qwen2 qwen3 mistral gemma2 gemma3_text phi3 olmo2 gpt_oss mixtral deepseek_v3"
    assert set(promised.split()) <= set(ARCHITECTURES)


@pytest.fixture(scope="module")
def prompts() -> list[Ids]:
    draw = random.Random(3)
    ids = [[draw.randrange(3, VOCAB_SIZE) for _ in range(length)] for length in LENGTHS]
    ids[-1][:SHARED] = ids[-2][:SHARED]
    return ids


@pytest.fixture(scope="module", params=ARCHITECTURES)
def architecture(request: pytest.FixtureRequest, prompts: list[Ids]) -> tuple[str, Any, list[Ids]]:
    """Name, model, and the reference's outputs."""
    model = ARCHITECTURES[request.param]()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # a fixture of a module is set up before those of its tests
    reference = generate_reference(model, prompts, NUM_TOKENS, in_one_batch=True)
    torch.set_num_threads(threads)
    return request.param, model, reference


@pytest.mark.parametrize("name", WAYS)
def test_text_equals_transformers(
    name: str, architecture: tuple[str, Any, list[Ids]], prompts: list[Ids], soak: bool, tell: Callable[[str], None]
) -> None:
    which, model, reference = architecture
    way = WAYS[name]
    if name == "tiny pool" and which in TINY_POOLS:
        way = replace(TINY_POOLS[which], min_preemptions=way.min_preemptions)
    report: dict[str, int] = {}
    asked, wanted = way.of(prompts, soak=soak), way.of(reference, soak=soak)
    comparison = Comparison(asked, wanted, partial(is_tie, model), MAX_TIES * way.times)
    comparison.check(run_way(way, model, report, **BASE))
    say = tell if way.min_preemptions or way.is_warm or comparison.ties else print
    say(f"{which}, {name}: {report['preemptions']} preemptions, {report['cached']} cached, {len(comparison.ties)} ties")
    assert report["preemptions"] >= way.min_preemptions
    assert (report["cached"] > 0) or not way.is_warm
