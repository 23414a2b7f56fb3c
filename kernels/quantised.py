"""Keys and values in one byte a number: the twin in plain torch of what the Triton kernels store and read.

Before: a step's keys and values. After: caches of float8_e4m3fn or int8 with a scale for each token and head. Always: a row is
its numbers times its scale; the scale is that of the row's largest number, so a row's error is at most 1 / 16 of a number in
fp8 (half a step of its 3 bits) and 1 / 254 of its largest in int8; a row of zeros has scale 1.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .attention_batch import AttentionBatch
from .reference import paged_attention
from .shapes import KernelInputError, bind

LARGEST = {torch.float8_e4m3fn: 448.0, torch.int8: 127.0}
"""The largest number of each format, on which a row's largest comes to lie."""


@torch.no_grad()
def store_kv_quantised(
    k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, k_scales: Tensor, v_scales: Tensor, slots: Tensor
) -> None:
    """Put this step's keys and values, in the caches' format, where `slots` says; a negative slot is skipped.

    k [T, Hkv, Dk] · v [T, Hkv, Dv] · k_cache [N, Hkv, B, Dk] and v_cache [N, Hkv, B, Dv] of float8_e4m3fn or int8 · k_scales
    and v_scales [N, Hkv, B] float32 · slots [T] int64, each at most once. Raises `ShapeError` and `KernelInputError`.
    """
    check_quantised(k, v, k_cache, v_cache, k_scales, v_scales, slots)
    size = k_cache.shape[2]
    written = slots >= 0
    blocks, offsets = slots[written] // size, slots[written] % size
    for rows, cache, scales in ((k, k_cache, k_scales), (v, v_cache, v_scales)):
        numbers, scale = quantise(rows[written], cache.dtype)
        # torch indexes no float8 on every device: bytes are bytes.
        cache.view(torch.uint8)[blocks, :, offsets] = numbers.view(torch.uint8)
        scales[blocks, :, offsets] = scale


def quantise(rows: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """rows [..., D] as numbers of `dtype` [..., D] and scales [...] float32."""
    rows = rows.float()
    largest = rows.abs().amax(-1)
    scale = torch.where(largest > 0, largest / LARGEST[dtype], 1.0)
    scaled = rows / scale.unsqueeze(-1)
    return (scaled.round() if dtype == torch.int8 else scaled).to(dtype), scale


@torch.no_grad()
def paged_attention_quantised(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    batch: AttentionBatch,
    *,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    k_scales: Tensor,
    v_scales: Tensor,
) -> Tensor:
    """As `reference.paged_attention` over rows that are numbers times scales. Copies whole caches: for tests."""
    k_rows, v_rows = (
        (cache.float() * scales.unsqueeze(-1)).to(q.dtype) for cache, scales in ((k_cache, k_scales), (v_cache, v_scales))
    )
    return paged_attention(q, k_rows, v_rows, batch, scale=scale, window=window, softcap=softcap, sinks=sinks)


def check_quantised(
    k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, k_scales: Tensor, v_scales: Tensor, slots: Tensor
) -> None:
    """Refuse what `store_kv_quantised` does not take."""
    sizes = bind("T Hkv Dk", k=k).bind("T Hkv Dv", v=v).bind("T", slots=slots)
    sizes.bind("N Hkv B Dk", k_cache=k_cache).bind("N Hkv B Dv", v_cache=v_cache)
    sizes.bind("N Hkv B", k_scales=k_scales, v_scales=v_scales)
    for name, cache in (("k_cache", k_cache), ("v_cache", v_cache)):
        if cache.dtype not in LARGEST or cache.dtype != k_cache.dtype:
            raise KernelInputError(f"{name} has dtype {cache.dtype}: must be torch.float8_e4m3fn or torch.int8, both alike")
    for name, scales in (("k_scales", k_scales), ("v_scales", v_scales)):
        if scales.dtype != torch.float32:
            raise KernelInputError(f"{name} has dtype {scales.dtype}: must be torch.float32")
    if slots.dtype != torch.int64:
        raise KernelInputError(f"slots has dtype {slots.dtype}: must be torch.int64")
