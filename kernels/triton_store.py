"""New keys and values to their slots, in Triton: as they are, or in one byte a number.

Before: a layer's projections and rotations. After: `paged_attention` of the same step. Always: what the twins in `reference.py`
and `quantised.py` promise; one program writes all heads of one token, a negative slot ends it at once.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .bound_launch import KernelLaunch, Launcher
from .input_checks import check_compact, check_same_dtype, check_store
from .quantised import LARGEST, LEAST, check_quantised

_LEAST = tl.constexpr(LEAST)


@triton.jit
def write_rows(
    rows, slot, head, d, mask, heads, to_ptr, scale_ptr, block_size, largest,
    to_block, to_head, to_slot, scale_block, scale_head, QUANTISED: tl.constexpr, ROUNDED: tl.constexpr,
):  # fmt: skip
    """One token's rows [heads, width] to its slot, if need be as numbers of the cache's format and their scales."""
    block = slot // block_size
    offset = slot % block_size
    if QUANTISED:
        rows = rows.to(tl.float32)
        top = tl.max(tl.abs(rows), 1)
        scale = tl.where(top > _LEAST, top / largest, 1.0)
        rows = rows / scale[:, None]
        if ROUNDED:
            # To the nearest, the even one of two: adding 1.5 * 2^23 leaves no room for a fraction.
            rows = (rows + 12582912.0) - 12582912.0
        tl.store(scale_ptr + block * scale_block + head * scale_head + offset, scale, mask=head < heads)
    to = to_ptr + block * to_block + head[:, None] * to_head + offset * to_slot + d[None, :]
    tl.store(to, rows.to(to_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["block_size", "heads"])
def _store(
    from_ptr, to_ptr, scale_ptr, slots_ptr, block_size, heads, width, largest,
    from_token, from_head, to_block, to_head, to_slot, scale_block, scale_head,
    HEADS: tl.constexpr, WIDTH: tl.constexpr, QUANTISED: tl.constexpr, ROUNDED: tl.constexpr,
):  # fmt: skip
    """One token's keys, or values."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + token)
    if slot >= 0:
        head = (tl.program_id(1) * HEADS + tl.arange(0, HEADS)).to(tl.int64)
        d = tl.arange(0, WIDTH)
        mask = (head < heads)[:, None] & (d < width)[None, :]
        rows = tl.load(from_ptr + token * from_token + head[:, None] * from_head + d[None, :], mask=mask, other=0.0)
        write_rows(
            rows, slot, head, d, mask, heads, to_ptr, scale_ptr, block_size, largest,
            to_block, to_head, to_slot, scale_block, scale_head, QUANTISED, ROUNDED,
        )  # fmt: skip


@torch.no_grad()
def store_kv(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor, *, launch: Launcher | None = None) -> None:
    """As `reference.store_kv`; slots are not compared with the cache's size on a GPU, which would wait for it."""
    check_store(k, v, k_cache, v_cache, slots)
    check_same_dtype(k=k, v=v, k_cache=k_cache, v_cache=v_cache)
    check_compact(k=k, v=v, k_cache=k_cache, v_cache=v_cache, slots=slots)
    for rows, cache in ((k, k_cache), (v, v_cache)):
        _run(rows, cache, None, slots, launch)


@torch.no_grad()
def store_kv_quantised(
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k_scales: Tensor,
    v_scales: Tensor,
    slots: Tensor,
    *,
    launch: Launcher | None = None,
) -> None:
    """As `quantised.store_kv_quantised`, with contiguous scales."""
    check_quantised(k, v, k_cache, v_cache, k_scales, v_scales, slots)
    check_compact(k=k, v=v, k_cache=k_cache, v_cache=v_cache, slots=slots)
    for rows, cache, scales in ((k, k_cache, k_scales), (v, v_cache, v_scales)):
        _run(rows, cache, scales, slots, launch)


def _run(rows: Tensor, cache: Tensor, scales: Tensor | None, slots: Tensor, launch: Launcher | None) -> None:
    tokens, heads, width = rows.shape
    if not rows.numel():
        return
    padded = triton.next_power_of_2(width)
    # About 512 numbers a program of one warp: 16 bytes and more a lane.
    some = max(1, min(triton.next_power_of_2(heads), 512 // padded))
    arguments = (
        rows, cache, scales, slots, cache.shape[2], heads, width, LARGEST.get(cache.dtype, 1.0),
        rows.stride(0), rows.stride(1), *cache.stride()[:3],
        scales.stride(0) if scales is not None else 0, scales.stride(1) if scales is not None else 0,
    )  # fmt: skip
    constants = {
        "HEADS": some,
        "WIDTH": padded,
        "QUANTISED": scales is not None,
        "ROUNDED": cache.dtype == torch.int8,
        "num_warps": 1,
    }
    grid = (tokens, triton.cdiv(heads, some))
    KernelLaunch(_store, grid, arguments, constants).run(launch)
