"""Rotary positions and the store of what they rotate, in Triton, in one launch.

Before: a layer's projections. After: `paged_attention` of the same step. Always: what the twin in `rope.py` promises; a program
has some heads of one token: of its queries, its keys or its values.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .bound_launch import KernelLaunch, Launcher
from .input_checks import check_compact, check_same_dtype, check_store
from .quantised import LARGEST, check_quantised
from .rope import check_rope
from .triton_store import write_rows


@triton.jit
def _rotated(from_ptr, head, from_head, d, mask, cos_ptr, sin_ptr, rotary):
    """Some heads of one token [heads, width], the first `rotary` numbers of each rotated."""
    rows = tl.load(from_ptr + head[:, None] * from_head + d[None, :], mask=mask, other=0.0)
    half = rotary // 2
    across = tl.where(d < half, d + half, d - half)
    is_turned = d < rotary
    mask = mask & is_turned[None, :]
    others = tl.load(from_ptr + head[:, None] * from_head + across[None, :], mask=mask, other=0.0).to(tl.float32)
    others = tl.where((d < half)[None, :], -others, others)
    cos = tl.load(cos_ptr + d, mask=is_turned, other=1.0).to(tl.float32)
    sin = tl.load(sin_ptr + d, mask=is_turned, other=0.0).to(tl.float32)
    return (rows.to(tl.float32) * cos[None, :] + others * sin[None, :]).to(rows.dtype)


@triton.jit(do_not_specialize=["block_size", "query_heads", "kv_heads"])
def _rope_store(
    q_ptr, k_ptr, v_ptr, out_ptr, cos_ptr, sin_ptr, k_to_ptr, v_to_ptr, k_scale_ptr, v_scale_ptr, slots_ptr,
    block_size, query_heads, kv_heads, key_width, value_width, rotary, largest,
    q_token, q_head, k_token, k_head, v_token, v_head, out_token, out_head, cos_token, sin_token,
    k_block, k_to_head, k_slot, v_block, v_to_head, v_slot, scale_block, scale_head,
    HEADS: tl.constexpr, KEYS: tl.constexpr, VALUES: tl.constexpr, QUANTISED: tl.constexpr, ROUNDED: tl.constexpr,
):  # fmt: skip
    """Some heads of one token: the first programs have its queries, then its keys, then its values."""
    token = tl.program_id(0).to(tl.int64)
    number = tl.program_id(1)
    query_programs = tl.cdiv(query_heads, HEADS)
    kv_programs = tl.cdiv(kv_heads, HEADS)
    some = tl.arange(0, HEADS).to(tl.int64)
    key_d = tl.arange(0, KEYS)
    is_key = (key_d < key_width)[None, :]
    cos = cos_ptr + token * cos_token
    sin = sin_ptr + token * sin_token
    if number < query_programs:
        head = number * HEADS + some
        mask = (head < query_heads)[:, None] & is_key
        rows = _rotated(q_ptr + token * q_token, head, q_head, key_d, mask, cos, sin, rotary)
        tl.store(out_ptr + token * out_token + head[:, None] * out_head + key_d[None, :], rows, mask=mask)
    else:
        slot = tl.load(slots_ptr + token)
        if slot >= 0:
            if number < query_programs + kv_programs:
                head = (number - query_programs) * HEADS + some
                mask = (head < kv_heads)[:, None] & is_key
                rows = _rotated(k_ptr + token * k_token, head, k_head, key_d, mask, cos, sin, rotary)
                write_rows(
                    rows, slot, head, key_d, mask, kv_heads, k_to_ptr, k_scale_ptr, block_size, largest,
                    k_block, k_to_head, k_slot, scale_block, scale_head, QUANTISED, ROUNDED,
                )  # fmt: skip
            else:
                head = (number - query_programs - kv_programs) * HEADS + some
                value_d = tl.arange(0, VALUES)
                mask = (head < kv_heads)[:, None] & (value_d < value_width)[None, :]
                rows = tl.load(v_ptr + token * v_token + head[:, None] * v_head + value_d[None, :], mask=mask, other=0.0)
                write_rows(
                    rows, slot, head, value_d, mask, kv_heads, v_to_ptr, v_scale_ptr, block_size, largest,
                    v_block, v_to_head, v_slot, scale_block, scale_head, QUANTISED, ROUNDED,
                )  # fmt: skip


@torch.no_grad()
def rope_store_kv(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cos: Tensor,
    sin: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slots: Tensor,
    *,
    k_scales: Tensor | None = None,
    v_scales: Tensor | None = None,
    launch: Launcher | None = None,
) -> Tensor:
    """As `rope.rope_store_kv`, with no gaps in the last dimensions."""
    check_rope(q, k, cos, sin, k_scales, v_scales)
    if k_scales is not None and v_scales is not None:
        check_quantised(k, v, k_cache, v_cache, k_scales, v_scales, slots)
    else:
        check_store(k, v, k_cache, v_cache, slots)
        check_same_dtype(k=k, v=v, k_cache=k_cache, v_cache=v_cache)
    check_compact(q=q, k=k, v=v, cos=cos, sin=sin, k_cache=k_cache, v_cache=v_cache, slots=slots)
    (tokens, query_heads, key_width), kv_heads, value_width = q.shape, k.shape[1], v.shape[2]
    out = q.new_empty(q.shape)
    if not tokens or not key_width:
        return out
    keys, values = triton.next_power_of_2(key_width), triton.next_power_of_2(value_width)
    # About 512 numbers a program of one warp: 16 bytes and more a lane.
    heads = max(1, min(triton.next_power_of_2(kv_heads), 512 // max(keys, values)))
    scaled = k_scales is not None
    arguments = (
        q, k, v, out, cos, sin, k_cache, v_cache, k_scales, v_scales, slots,
        k_cache.shape[2], query_heads, kv_heads, key_width, value_width, cos.shape[1], LARGEST.get(k_cache.dtype, 1.0),
        *q.stride()[:2], *k.stride()[:2], *v.stride()[:2], *out.stride()[:2], cos.stride(0), sin.stride(0),
        *k_cache.stride()[:3], *v_cache.stride()[:3], *(k_scales.stride()[:2] if k_scales is not None else (0, 0)),
    )  # fmt: skip
    constants = {
        "HEADS": heads,
        "KEYS": keys,
        "VALUES": values,
        "QUANTISED": scaled,
        "ROUNDED": k_cache.dtype == torch.int8,
        "num_warps": 1,
    }
    grid = (tokens, triton.cdiv(query_heads, heads) + 2 * triton.cdiv(kv_heads, heads))
    KernelLaunch(_rope_store, grid, arguments, constants).run(launch)
    return out
