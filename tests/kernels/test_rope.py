"""Rotary positions and the store in one: what transformers rotates, at the slots that are named and nowhere else."""

import sys
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from blocktable.kernels import KernelInputError, ShapeError, quantised, rope
from tests.conftest import SEED
from tests.kernels.checks import distance
from tests.kernels.implementations import Change, changed

pytest.importorskip("triton", reason="Triton is not installed")
interpreter = pytest.importorskip("tests.kernels.interpreter")
interpreter.mend()

from blocktable.kernels import triton_rope  # noqa: E402 - after the interpreter is chosen

IMPLEMENTATIONS = {"torch": rope.rope_store_kv, "triton": triton_rope.rope_store_kv}
TOKENS, BLOCKS, SIZE = 11, 4, 7
NAN = float("nan")


@dataclass
class Given:
    """The arguments, and what must come of them."""

    q: Tensor
    k: Tensor
    v: Tensor
    cos: Tensor
    sin: Tensor
    slots: Tensor

    @classmethod
    def of(cls, *, width: int, rotary: int, heads: tuple[int, int], dtype: torch.dtype = torch.float32) -> "Given":
        torch.manual_seed(SEED)
        # As a model makes them: heads first.
        q, k, v = (torch.randn(count, TOKENS, width).to(dtype).transpose(0, 1) for count in (*heads, heads[1]))
        angles = torch.rand(TOKENS, rotary // 2) * 6
        angles = torch.cat((angles, angles), -1)
        slots = torch.randperm(BLOCKS * SIZE)[:TOKENS]
        slots[3] = -1
        return cls(q, k, v, angles.cos().to(dtype), angles.sin().to(dtype), slots)

    def rotated(self, rows: Tensor) -> Tensor:
        """By transformers, in float64."""
        width = self.cos.shape[1]
        turned = rows[..., :width].double().transpose(0, 1)[None]
        turned, _ = apply_rotary_pos_emb(turned, turned, self.cos.double()[None], self.sin.double()[None])
        return torch.cat((turned[0].transpose(0, 1), rows[..., width:].double()), -1)

    def caches(self, dtype: torch.dtype, fill: float = NAN) -> list[Tensor]:
        heads, width = self.k.shape[1:]
        return [torch.full((BLOCKS, heads, SIZE, width), fill).to(dtype) for _ in range(2)]


def check(package: Any, given: Given, tolerance: float) -> None:
    """Queries come back rotated; keys and values lie at their slots; every other number is as it was."""
    k_cache, v_cache = given.caches(given.q.dtype)
    out = package(given.q, given.k, given.v, given.cos, given.sin, k_cache, v_cache, given.slots)
    assert distance(out, given.rotated(given.q)) <= tolerance
    k_wanted, v_wanted = (torch.full_like(cache, NAN, dtype=torch.float64) for cache in (k_cache, v_cache))
    for row, slot in enumerate(given.slots.tolist()):
        if slot >= 0:
            k_wanted[slot // SIZE, :, slot % SIZE] = given.rotated(given.k)[row]
            v_wanted[slot // SIZE, :, slot % SIZE] = given.v[row].double()
    for cache, wanted in ((k_cache, k_wanted), (v_cache, v_wanted)):
        assert torch.equal(cache.isnan(), wanted.isnan()), "another slot was written"
        assert distance(cache.nan_to_num(), wanted.nan_to_num()) <= tolerance


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
@pytest.mark.parametrize(
    ("width", "rotary", "heads", "dtype", "tolerance"),
    [
        (32, 32, (4, 2), torch.float32, 1e-6),
        (80, 80, (3, 3), torch.float32, 1e-6),
        (64, 16, (7, 1), torch.float16, 1e-3),
        (128, 64, (4, 4), torch.bfloat16, 1e-2),
        (24, 0, (2, 1), torch.float32, 0.0),
    ],
    ids=str,
)
def test_queries_and_keys_are_rotated_as_by_transformers_and_stored(
    name: str, width: int, rotary: int, heads: tuple[int, int], dtype: torch.dtype, tolerance: float
) -> None:
    with interpreter.shuffled_programs(width):
        check(IMPLEMENTATIONS[name], Given.of(width=width, rotary=rotary, heads=heads, dtype=dtype), tolerance)


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn], ids=str)
def test_one_byte_a_number_is_stored_as_by_the_twin(dtype: torch.dtype) -> None:
    given = Given.of(width=32, rotary=32, heads=(4, 3))
    found = []
    for rope_store in IMPLEMENTATIONS.values():
        caches = given.caches(dtype, 0.0)
        scales = [torch.full((BLOCKS, 3, SIZE), NAN) for _ in range(2)]
        named = dict(zip(("k_scales", "v_scales"), scales))
        out = rope_store(given.q, given.k, given.v, given.cos, given.sin, *caches, given.slots, **named)
        found.append([out, *scales, *(cache.float() * scale.unsqueeze(-1) for cache, scale in zip(caches, scales))])
    for twin, ours in zip(*found):
        assert torch.equal(twin.isnan(), ours.isnan())
        # A quotient on the edge between two numbers may fall to either side.
        assert ((twin - ours).nan_to_num().abs() > 1e-5).float().mean() < 1e-2
    assert quantised.LARGEST[dtype] > 0


@pytest.mark.parametrize("rope_store", IMPLEMENTATIONS.values(), ids=IMPLEMENTATIONS)
def test_what_cannot_be_right_is_refused(rope_store: Any) -> None:
    given = Given.of(width=32, rotary=32, heads=(4, 2))
    caches = given.caches(torch.float32, 0.0)
    rest = (given.v, given.cos, given.sin, *caches, given.slots)
    with pytest.raises(ShapeError, match="k has T=10 in dimension 0: must be 11"):
        rope_store(given.q, given.k[1:], *rest)
    with pytest.raises(KernelInputError, match="cos has R=34: must be even and at most Dk=32"):
        rope_store(given.q, given.k, given.v, torch.ones(TOKENS, 34), torch.ones(TOKENS, 34), *caches, given.slots)
    with pytest.raises(KernelInputError, match="k has dtype torch.float16: must be torch.float32, the dtype of q"):
        rope_store(given.q, given.k.half(), *rest)
    with pytest.raises(KernelInputError, match="both be given"):
        rope_store(given.q, given.k, *rest, k_scales=torch.ones(BLOCKS, 2, SIZE))
    assert not any(cache.any() for cache in caches)


MUTANTS: list[tuple[str, Change]] = [
    ("rope", ("rope", "torch.cat((-halves[1], halves[0]), -1)", "torch.cat((halves[1], -halves[0]), -1)")),
    ("rope", ("rope", "turned = rotated(k, cos, sin)", "turned = k")),
    ("triton_rope", ("triton_rope", "tl.where((d < half)[None, :], -others, others)", "others")),
    ("triton_rope", ("triton_rope", "half = rotary // 2", "half = rotary // 4")),
    ("triton_rope", ("triton_rope", "is_turned = d < rotary", "is_turned = d >= 0")),
    ("triton_rope", ("triton_rope", "cos = cos_ptr + token * cos_token", "cos = cos_ptr + 0 * cos_token")),
    ("triton_rope", ("triton_rope", "head = (number - query_programs) * HEADS", "head = number * HEADS")),
]


def play(package: ModuleType, module: str) -> None:
    check(sys.modules[f"{package.__name__}.{module}"].rope_store_kv, Given.of(width=64, rotary=32, heads=(12, 9)), 1e-6)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, of what a fault reads behind the angles
@pytest.mark.parametrize(("module", "change"), MUTANTS, ids=lambda part: part if isinstance(part, str) else part[1])
def test_a_planted_fault_is_caught(module: str, change: Change) -> None:
    play(changed(), module)
    with pytest.raises((AssertionError, IndexError, RuntimeError)):
        play(changed(change), module)
