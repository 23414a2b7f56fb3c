"""A tiny model served by hand: wrapped, with its KV memory and a runner; and the same model's own answers."""

import random
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

from blocktable.model.kv_memory import KVMemory
from blocktable.model.kv_sizing import size_kv
from blocktable.model.loader import LoadedModel, wrap_model
from blocktable.model.runner import ModelRunner
from tests.model.handmade_plan import Pages, run_schedule

LENGTHS = (21, 13)
SCHEDULE = [[8, 5], [8, 1], [1, 6], [4, 0], [0, 1]]
"""Chunks and single tokens in one step in both orders, and steps of one sequence."""


@dataclass(frozen=True)
class Served:
    """What an engine would hold."""

    loaded: LoadedModel
    memory: KVMemory
    runner: ModelRunner


def serve(model: PreTrainedModel, pages: Pages, *, self_check: bool = False) -> Served:
    """Wrap `model` and give it memory for `pages`."""
    loaded = wrap_model(model, self_check=self_check)
    sizing = size_kv(loaded.geometry, pages.block_size, loaded.device, num_blocks=pages.num_blocks)
    memory = KVMemory(loaded.geometry, sizing, loaded.device)
    return Served(loaded, memory, ModelRunner(loaded, memory))


def texts_of(vocab_size: int, seed: int = 0, lengths: tuple[int, ...] = LENGTHS) -> list[list[int]]:
    """Random ids, none of them special (0 to 2)."""
    draw = random.Random(seed)
    return [[draw.randrange(3, vocab_size) for _ in range(length)] for length in lengths]


def own_logits(model: PreTrainedModel, texts: list[list[int]]) -> list[Tensor]:
    """[L, vocab] of each text by the model's own attention, each alone and at once. `model` must not be wrapped."""
    with torch.inference_mode():
        return [model(input_ids=torch.tensor([text]), use_cache=False).logits[0].float() for text in texts]


def paged_logits(model: PreTrainedModel, texts: list[list[int]], seed: int = 0) -> list[Tensor]:
    """The same, packed and chunked over shuffled blocks."""
    pages = Pages(texts, seed=seed)
    return run_schedule(serve(model, pages).runner, pages, SCHEDULE)


def distance(got: list[Tensor], expected: list[Tensor]) -> float:
    """Largest difference, relative to the largest logit."""
    size = max(float(logits.abs().max()) for logits in expected)
    return max(float((g - e).abs().max()) for g, e in zip(got, expected)) / size
