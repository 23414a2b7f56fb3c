"""Bad arguments are refused by name, value and bound before anything is written."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from blocktable.kernels import KernelInputError, ShapeError
from tests.kernels.implementations import REFERENCE, Implementation
from tests.kernels.paged_case import Length, Shape, empty_pool, make_case

SHAPE = Shape(block_size=4, key_width=6)


def store_arguments(**changes: Any) -> dict[str, Any]:
    pool, k_cache, v_cache = empty_pool(SHAPE, 5, 0.0)
    arguments = {"k": torch.ones(3, 2, 6), "v": torch.ones(3, 2, 8), "slots": torch.tensor([4, 5, 6])}
    return {"pool": pool, "k_cache": k_cache, "v_cache": v_cache, **arguments, **changes}


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"slots": torch.tensor([4, 5])}, ShapeError, "slots has T=2 in dimension 0: must be 3"),
        ({"v": torch.ones(4, 2, 8)}, ShapeError, "v has T=4 in dimension 0: must be 3"),
        ({"k": torch.ones(3, 6)}, ShapeError, r"k has shape \[3, 6\]: must be \[T, Hkv, Dk\]"),
        ({"k": torch.ones(3, 2, 8)}, ShapeError, "k_cache has Dk=6 in dimension 3: must be 8"),
        ({"v": torch.ones(3, 1, 8)}, ShapeError, "v has Hkv=1 in dimension 1: must be 2"),
        ({"slots": torch.tensor([4, 5, 20])}, KernelInputError, "slots holds 20: must be below 20"),
        ({"slots": torch.tensor([-1, 5, 2**40])}, KernelInputError, "slots holds 1099511627776: must be below 20"),
        ({"slots": torch.tensor([4, 5, 6], dtype=torch.int32)}, KernelInputError, "slots has dtype torch.int32"),
        ({"v": torch.ones(3, 2, 8).half()}, KernelInputError, "v has dtype torch.float16: must be torch.float32"),
    ],
)
def test_a_store_that_cannot_be_right_is_refused_and_writes_nothing(
    changes: dict[str, Any], error: type[Exception], message: str
) -> None:
    arguments = store_arguments(**changes)
    pool = arguments.pop("pool")
    with pytest.raises(error, match=message):
        REFERENCE.store_kv(**arguments)
    assert not pool.any()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"q": torch.ones(3, 4, 6)}, "q has T=3: must be 4, the batch's tokens"),
        ({"q": torch.ones(4, 4, 5)}, "k_cache has Dk=6 in dimension 3: must be 5"),
        ({"q": torch.ones(4, 3, 6)}, "q has Hq=3: must be a multiple of Hkv=2"),
        ({"q": torch.ones(4, 4, 6).half()}, "k_cache has dtype torch.float32: must be torch.float16"),
        ({"sinks": torch.ones(3)}, "sinks has Hq=3 in dimension 0: must be 4"),
        ({"window": -1}, "window=-1: must be 0"),
        ({"softcap": -1.0}, "softcap=-1.0: must be 0"),
        ({"softcap": float("nan")}, "softcap=nan: must be 0"),
        ({"scale": float("inf")}, "scale=inf: must be finite"),
    ],
)
def test_an_attention_that_cannot_be_right_is_refused(changes: dict[str, Any], message: str) -> None:
    case = make_case(SHAPE, [Length(3, 5), Length(1, 7)])
    _, k_cache, v_cache = case.pool(0.0)
    batch = REFERENCE.build(case.tables, case.query_starts, case.seq_lens, 4)
    arguments = {"q": case.q, "k_cache": k_cache, "v_cache": v_cache, "batch": batch, "scale": 1.0, **changes}
    with pytest.raises(KernelInputError, match=message):
        REFERENCE.paged_attention(**arguments)


def test_a_cache_that_the_batch_does_not_fit_is_refused() -> None:
    case = make_case(SHAPE, [Length(3, 5), Length(1, 7)])
    _, k_cache, v_cache = case.pool(0.0)
    batch = REFERENCE.build(case.tables, case.query_starts, case.seq_lens, 4)
    highest = int(case.tables.max())
    with pytest.raises(KernelInputError, match=f"block_tables holds {highest}: must be below {highest}"):
        REFERENCE.paged_attention(case.q, k_cache[:highest], v_cache[:highest], batch, scale=1.0)
    with pytest.raises(KernelInputError, match="k_cache has B=3: must be 4, the batch's block size"):
        REFERENCE.paged_attention(case.q, k_cache[:, :, :3], v_cache[:, :, :3], batch, scale=1.0)
    k_odd = k_cache.transpose(2, 3).contiguous().transpose(2, 3)
    with pytest.raises(KernelInputError, match="k_cache has stride 4 in its last dimension: must be 1"):
        REFERENCE.paged_attention(case.q, k_odd, v_cache, batch, scale=1.0)


def int32(*numbers: int) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.int32)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((int32(0, 1), int32(5), 4), r"query_starts has S\+1=2 in dimension 0: must be 3"),
        ((int32(0, 1, 2), int32(5), 4), "seq_lens has S=1 in dimension 0: must be 2"),
        ((int32(1, 2, 3), int32(5, 5), 4), r"query_starts\[0\]=1: must be 0"),
        ((int32(0, 2, 1), int32(5, 5), 4), r"query_starts\[2\]=1: must be at least 2"),
        ((int32(0, 1, 4), int32(5, 2), 4), r"seq_lens\[1\]=2: must be 3 \(its queries\) to 12"),
        ((int32(0, 1, 2), int32(5, 13), 4), r"seq_lens\[1\]=13: must be 1 \(its queries\) to 12"),
        ((int32(0, 1, 2), int32(5, 9), 4), r"block_tables\[1, 2\]=-1: must be a block id, for seq_lens\[1\]=9"),
        ((int32(0, 1, 2), int32(5, 5), 0), "block_size=0: must be at least 1"),
        ((int32(0, 1, 2).float(), int32(5, 5), 4), "query_starts has dtype torch.float32"),
    ],
)
def test_a_batch_that_cannot_be_right_is_refused(arguments: tuple[Any, ...], message: str) -> None:
    tables = torch.tensor([[1, 2, -1], [3, 4, -1]], dtype=torch.int32)
    with pytest.raises(KernelInputError, match=message):
        REFERENCE.build(tables, *arguments)


def test_the_refusals_are_value_errors(kernels: Implementation) -> None:
    build: Callable[..., Any] = kernels.build
    with pytest.raises(ValueError, match="block_size=-3"):
        build(int32(1).view(1, 1), int32(0, 1), int32(1), -3)
