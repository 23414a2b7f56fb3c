"""A pairwise cover of what the Triton kernels must be right for: dtype, head size, block size, grouping, features.

Before: `test_triton.py` (in the interpreter) or `on_gpu.py` names a case. After: it is compared with attention over positions.
"""

import random
from collections.abc import Iterator
from itertools import combinations, product
from typing import Any

import torch

from tests.kernels.paged_case import Case, Length, Shape, make_case

TOLERANCE = {torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 1e-2}
"""A rounding of the weights and one of the answer, as `checks.distance` tells them."""

FACTORS: dict[str, list[Any]] = {
    "dtype": [torch.float32, torch.float16, torch.bfloat16],
    "width": [32, 64, 80, 96, 128, 256],
    "block_size": [1, 7, 16, 24, 32, 128],
    "heads": [(1, 1), (2, 1), (2, 3), (1, 4), (2, 7)],
    "features": [
        {},
        {"window": 5},
        {"window": 20, "has_sinks": True},
        {"softcap": 0.7},
        {"softcap": 3.0, "has_sinks": True},
        {"has_slopes": True},
        {"window": 9, "softcap": 2.0, "has_sinks": True, "has_slopes": True},
    ],
}
LENGTHS = [Length(1, 33), Length(3, 17, shares=16), Length(1, 17, shares=17), Length(5, 5), Length(0, 3), Length(1, 1)]

DECODES = [Length(1, 33), Length(1, 17, shares=16), Length(1, 17, shares=17), Length(1, 48), Length(0, 3), Length(1, 1)]


def pairwise(factors: dict[str, list[Any]]) -> Iterator[dict[str, Any]]:
    """Choices in which every two values of two factors meet, found greedily."""
    names = list(factors)
    numbers = {name: range(len(values)) for name, values in factors.items()}
    left = {(a, i, b, j) for a, b in combinations(names, 2) for i, j in product(numbers[a], numbers[b])}
    draw = random.Random(0)
    while left:
        tries = []
        for _ in range(30):
            a, i, b, j = draw.choice(sorted(left))
            one = {name: draw.choice(numbers[name]) for name in names} | {a: i, b: j}
            tries.append((sum((x, one[x], y, one[y]) in left for x, y in combinations(names, 2)), sorted(one.items())))
        chosen = dict(max(tries)[1])
        left -= {(x, chosen[x], y, chosen[y]) for x, y in combinations(names, 2)}
        yield {name: factors[name][number] for name, number in chosen.items()}


CASES = list(pairwise(FACTORS))


def case_of(one: dict[str, Any], seed: int, lengths: list[Length] = LENGTHS) -> Case:
    """The case of one choice, for sequences of these lengths."""
    torch.manual_seed(seed)
    kv_heads, grouped = one["heads"]
    shape = Shape(
        block_size=one["block_size"],
        kv_heads=kv_heads,
        grouped=grouped,
        key_width=one["width"],
        value_width=one["width"],
        dtype=one["dtype"],
        **one["features"],
    )
    return make_case(shape, lengths, spread=2.0)
