"""What the kernels refuse before they read or write anything; every implementation asks here.

Before: a launcher has its arguments. After: it has their sizes by letter. Always: a refusal names the tensor or option, its
value and the bound it breaks.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .shapes import KernelInputError, Sizes, bind

if TYPE_CHECKING:
    from .attention_batch import AttentionBatch

ONE_BYTE = (torch.float8_e4m3fn, torch.int8)
"""Formats of caches whose rows have a scale each."""


def check_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    batch: AttentionBatch,
    *,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    slopes: Tensor | None = None,
    k_scales: Tensor | None = None,
    v_scales: Tensor | None = None,
) -> Sizes:
    """The sizes T, Hq, Dk, N, Hkv, B and Dv of arguments that `reference.paged_attention` takes.

    With scales, those of `quantised.paged_attention_quantised`. Raises `ShapeError` and `KernelInputError`.
    """
    sizes = bind("T Hq Dk", q=q).bind("N Hkv B Dk", k_cache=k_cache).bind("N Hkv B Dv", v_cache=v_cache)
    by_head = {name: tensor for name, tensor in (("sinks", sinks), ("slopes", slopes)) if tensor is not None}
    sizes.bind("Hq", **by_head)
    scales = {name: tensor for name, tensor in (("k_scales", k_scales), ("v_scales", v_scales)) if tensor is not None}
    if len(scales) == 1:
        raise KernelInputError("k_scales and v_scales: must both be given, or neither")
    sizes.bind("N Hkv B", **scales)
    check_same_device(q=q, k_cache=k_cache, v_cache=v_cache, **by_head, **scales, block_tables=batch.block_tables)
    if scales:
        check_one_byte(k_cache, v_cache)
        check_scales(**scales)
    else:
        check_same_dtype(q=q, k_cache=k_cache, v_cache=v_cache)
    check_options(batch, sizes["B"], scale, window, softcap)
    if sizes["T"] != batch.num_tokens:
        raise KernelInputError(f"q has T={sizes['T']}: must be {batch.num_tokens}, the batch's tokens")
    if sizes["Hkv"] < 1 or sizes["Hq"] % sizes["Hkv"]:
        raise KernelInputError(f"q has Hq={sizes['Hq']}: must be a multiple of Hkv={sizes['Hkv']}")
    if batch.end_block > sizes["N"]:
        raise KernelInputError(f"block_tables holds {batch.end_block - 1}: must be below {sizes['N']}, the cache's blocks")
    return sizes


def check_options(batch: AttentionBatch, block_size: int, scale: float, window: int, softcap: float) -> None:
    """Refuse options of `paged_attention` that mean nothing, and a cache of another block size than the batch's."""
    if block_size != batch.block_size:
        raise KernelInputError(f"k_cache has B={block_size}: must be {batch.block_size}, the batch's block size")
    if window < 0:
        raise KernelInputError(f"window={window}: must be 0 (none) or more")
    if not 0 <= softcap < math.inf:
        raise KernelInputError(f"softcap={softcap}: must be 0 (none) or a finite number above it")
    if not math.isfinite(scale):
        raise KernelInputError(f"scale={scale}: must be finite")


def check_single_queries(batch: AttentionBatch) -> None:
    """Refuse a sequence with more than one query."""
    if batch.has_chunks:
        raise KernelInputError("query_starts has a sequence with more than one query: must have at most one each")


def check_store(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor) -> Sizes:
    """The sizes T, Hkv, Dk, Dv, N and B of what `store_kv` takes, its dtypes aside. On a CPU, slots past the cache are refused.

    On a GPU they are not looked at, which would wait for it.
    """
    sizes = bind("T Hkv Dk", k=k).bind("T Hkv Dv", v=v).bind("T", slots=slots)
    sizes.bind("N Hkv B Dk", k_cache=k_cache).bind("N Hkv B Dv", v_cache=v_cache)
    check_same_device(k=k, v=v, k_cache=k_cache, v_cache=v_cache, slots=slots)
    if slots.dtype != torch.int64:
        raise KernelInputError(f"slots has dtype {slots.dtype}: must be torch.int64")
    end = sizes["N"] * sizes["B"]
    if slots.device.type == "cpu" and slots.numel() and int(slots.max()) >= end:
        raise KernelInputError(f"slots holds {int(slots.max())}: must be below {end} (blocks * block size)")
    return sizes


def check_one_byte(k_cache: Tensor, v_cache: Tensor) -> None:
    """Refuse caches of other formats than those with scales."""
    for name, cache in (("k_cache", k_cache), ("v_cache", v_cache)):
        if cache.dtype not in ONE_BYTE or cache.dtype != k_cache.dtype:
            raise KernelInputError(f"{name} has dtype {cache.dtype}: must be {' or '.join(map(str, ONE_BYTE))}, both alike")


def check_scales(**scales: Tensor) -> None:
    """Refuse scales that are not float32 without gaps."""
    for name, tensor in scales.items():
        if tensor.dtype != torch.float32 or not tensor.is_contiguous():
            found = f"{name} has dtype {tensor.dtype} and strides {tensor.stride()}"
            raise KernelInputError(f"{found}: must be torch.float32 and contiguous")


def check_same_dtype(**tensors: Tensor) -> None:
    """All have the dtype of the first."""
    (first, expected), *others = ((name, tensor.dtype) for name, tensor in tensors.items())
    for name, dtype in others:
        if dtype != expected:
            raise KernelInputError(f"{name} has dtype {dtype}: must be {expected}, the dtype of {first}")


def check_same_device(**tensors: Tensor) -> None:
    """All are where the first is."""
    (first, expected), *others = ((name, tensor.device) for name, tensor in tensors.items())
    for name, device in others:
        if device != expected:
            raise KernelInputError(f"{name} is on {device}: must be on {expected}, the device of {first}")


def check_compact(**tensors: Tensor | None) -> None:
    """No gaps in the last dimension of those that are given."""
    for name, tensor in tensors.items():
        if tensor is not None and tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
            raise KernelInputError(f"{name} has stride {tensor.stride(-1)} in its last dimension: must be 1")


def check_near(**dimensions: tuple[Tensor, int]) -> None:
    """Refuse a stride of a dimension whose multiples are no numbers of 32 bits, which the loops of attention count in."""
    for name, (tensor, dimension) in dimensions.items():
        size, step = tensor.shape[dimension], tensor.stride(dimension)
        if (size - 1) * step >= 2**31:
            found = f"{name} has stride {step} in dimension {dimension}"
            raise KernelInputError(f"{found}: must be at most {(2**31 - 1) // (size - 1)}, for {size} there")
