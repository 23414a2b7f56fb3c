"""Keys and values in one byte a number: the twin in plain torch of what the Triton kernels store and read.

Before: a step's keys and values. After: caches of float8_e4m3fn or int8 with a scale for each token and head. Always: a row is
its numbers times its scale; the scale is that of the row's largest number, so a row's error is at most 1 / 16 of a number in
fp8 (half a step of its 3 bits) and 1 / 254 of its largest in int8; a row without a number above `LEAST` becomes zeros.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .attention_batch import AttentionBatch
from .input_checks import check_attention, check_one_byte, check_same_device, check_same_dtype, check_scales, check_store
from .reference import paged_attention

LARGEST = {torch.float8_e4m3fn: 448.0, torch.int8: 127.0}
"""The largest number of each format, on which a row's largest comes to lie."""
LEAST = 1e-30
"""A row's scale is 1 if its largest number is not above this: those of still smaller ones would have no digits."""


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
    scale = torch.where(largest > LEAST, largest / LARGEST[dtype], 1.0)
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
    slopes: Tensor | None = None,
    k_scales: Tensor,
    v_scales: Tensor,
) -> Tensor:
    """As `reference.paged_attention` over rows that are numbers times scales. Copies whole caches: for tests."""
    options: dict[str, Any] = {"scale": scale, "window": window, "softcap": softcap, "sinks": sinks, "slopes": slopes}
    check_attention(q, k_cache, v_cache, batch, **options, k_scales=k_scales, v_scales=v_scales)
    k_rows, v_rows = (
        (cache.float() * scales.unsqueeze(-1)).to(q.dtype) for cache, scales in ((k_cache, k_scales), (v_cache, v_scales))
    )
    return paged_attention(q, k_rows, v_rows, batch, **options)


def check_quantised(
    k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, k_scales: Tensor, v_scales: Tensor, slots: Tensor
) -> None:
    """Refuse what `store_kv_quantised` does not take."""
    check_store(k, v, k_cache, v_cache, slots).bind("N Hkv B", k_scales=k_scales, v_scales=v_scales)
    check_same_dtype(k=k, v=v)
    check_same_device(k=k, k_scales=k_scales, v_scales=v_scales)
    check_one_byte(k_cache, v_cache)
    check_scales(k_scales=k_scales, v_scales=v_scales)
