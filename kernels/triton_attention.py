"""Paged attention for GPUs, in Triton: one kernel for prompts' chunks, decodes and mixtures of them.

Before: `store_kv` of the same step. After: the layer's output projection. Always: what `reference.paged_attention` promises,
but that a row that is not finite may spoil queries of its own sequence that stand before it in the same tile; offsets are
64-bit; the page ids of a tile are loaded one tile ahead, so that its keys and values are on their way while the one before is
multiplied.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from .attention_batch import AttentionBatch
from .launch_table import attention_launch, target_of
from .reference import check_options
from .shapes import KernelInputError, bind

_LOG2_E = tl.constexpr(1.4426950408889634)
_NO_WINDOW = 2**30

Launcher = Callable[..., Any]


@triton.jit(do_not_specialize=["num_seqs", "window", "block_size", "grouped"])
def _attend(
    q_ptr, k_ptr, v_ptr, out_ptr, table_ptr, starts_ptr, lens_ptr, sink_ptr, k_scale_ptr, v_scale_ptr,
    num_seqs, scale, softcap, window, block_size, grouped, key_width, value_width,
    q_token, q_head, out_token, out_head, table_row,
    k_block, k_head, k_slot, v_block, v_head, v_slot, scale_block, scale_head,
    ROWS: tl.constexpr, TILE: tl.constexpr, KEYS: tl.constexpr, VALUES: tl.constexpr, STAGES: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr, HAS_SINKS: tl.constexpr, HAS_SCALES: tl.constexpr,
):  # fmt: skip
    """One program: `ROWS // grouped` queries of one sequence with all query heads of one KV head."""
    queries = ROWS // grouped
    block = tl.program_id(0)
    kv_head = tl.program_id(1)
    # Sequence i has the query blocks from starts[i] // queries + i on: a bound that needs no count of blocks on the host.
    low = 0
    high = num_seqs
    while low < high:
        middle = (low + high) // 2
        if tl.load(starts_ptr + middle) // queries + middle <= block:
            low = middle + 1
        else:
            high = middle
    sequence = low - 1
    start = tl.load(starts_ptr + sequence)
    count = tl.load(starts_ptr + sequence + 1) - start
    first = (block - (start // queries + sequence)) * queries
    if first < count:
        length = tl.load(lens_ptr + sequence)
        row = tl.arange(0, ROWS)
        query = first + row // grouped
        head = kv_head * grouped + row % grouped
        is_row = (query < count) & (row < queries * grouped)
        position = length - count + query
        column = tl.arange(0, TILE)
        key_d = tl.arange(0, KEYS)
        value_d = tl.arange(0, VALUES)
        is_key = key_d < key_width
        is_value = value_d < value_width
        q_rows = (start + query).to(tl.int64) * q_token + head * q_head
        q = tl.load(q_ptr + q_rows[:, None] + key_d[None, :], mask=is_row[:, None] & is_key[None, :], other=0.0)
        maximum = tl.full([ROWS], float("-inf"), tl.float32)
        total = tl.zeros([ROWS], tl.float32)
        if HAS_SINKS:
            maximum = tl.load(sink_ptr + head, mask=is_row, other=0.0).to(tl.float32) * _LOG2_E
            total = tl.full([ROWS], 1.0, tl.float32)
        sums = tl.zeros([ROWS, VALUES], tl.float32)
        end = tl.minimum(length, length - count + first + queries)
        begin = tl.maximum(length - count + first - window + 1, 0) // TILE * TILE
        table = table_ptr + sequence.to(tl.int64) * table_row
        at = begin + column
        pages = tl.load(table + at // block_size, mask=at < end, other=0)
        for tile in tl.range(begin, end, TILE, num_stages=STAGES):
            at = tile + column
            is_column = (at < end) & (at > length - count + first - window)
            page = pages.to(tl.int64)
            later = at + TILE
            pages = tl.load(table + later // block_size, mask=later < end, other=0)
            slot = at % block_size
            k_rows = page * k_block + kv_head * k_head + slot * k_slot
            v_rows = page * v_block + kv_head * v_head + slot * v_slot
            k = tl.load(k_ptr + k_rows[None, :] + key_d[:, None], mask=is_column[None, :] & is_key[:, None], other=0.0)
            scores = tl.dot(q, k.to(q.dtype), input_precision="ieee") * scale
            if HAS_SCALES:
                scale_rows = page * scale_block + kv_head * scale_head + slot
                scores = scores * tl.load(k_scale_ptr + scale_rows, mask=is_column, other=0.0)[None, :]
            if HAS_SOFTCAP:
                # The tangent from an exponential that saturates instead of dividing infinities.
                scores = softcap * (1.0 - 2.0 / (tl.exp2(scores * (2.0 * _LOG2_E) / softcap) + 1.0))
            sees = (at[None, :] <= position[:, None]) & (at[None, :] > position[:, None] - window) & is_column[None, :]
            scores = tl.where(sees & is_row[:, None], scores * _LOG2_E, float("-inf"))
            new = tl.maximum(maximum, tl.max(scores, 1))
            shift = tl.where(new == float("-inf"), 0.0, new)
            weights = tl.exp2(scores - shift[:, None])
            correction = tl.exp2(maximum - shift)
            total = total * correction + tl.sum(weights, 1)
            v = tl.load(v_ptr + v_rows[:, None] + value_d[None, :], mask=is_column[:, None] & is_value[None, :], other=0.0)
            if HAS_SCALES:
                weights = weights * tl.load(v_scale_ptr + scale_rows, mask=is_column, other=0.0)[None, :]
            sums = sums * correction[:, None] + tl.dot(weights.to(q.dtype), v.to(q.dtype), input_precision="ieee")
            maximum = new
        out_rows = (start + query).to(tl.int64) * out_token + head * out_head
        answers = (sums / total[:, None]).to(out_ptr.dtype.element_ty)
        tl.store(out_ptr + out_rows[:, None] + value_d[None, :], answers, mask=is_row[:, None] & is_value[None, :])


@torch.no_grad()
def paged_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    batch: AttentionBatch,
    *,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    k_scales: Tensor | None = None,
    v_scales: Tensor | None = None,
    target: str | None = None,
    launch: Launcher | None = None,
) -> Tensor:
    """As `reference.paged_attention`: q [T, Hq, Dk] over the rows of `batch` -> [T, Hq, Dv].

    With `k_scales` and `v_scales` [N, Hkv, B] float32, contiguous, the caches are float8_e4m3fn or int8, and a row is its
    numbers times its scale. `target` and `launch` (called with kernel, grid, arguments and constants in place of a launch)
    are for compiling without a GPU. Raises `ShapeError` and `KernelInputError`.
    """
    sizes = bind("T Hq Dk", q=q).bind("N Hkv B Dk", k_cache=k_cache).bind("N Hkv B Dv", v_cache=v_cache)
    if sinks is not None:
        sizes.bind("Hq", sinks=sinks)
    quantised = _check_formats(q, k_cache, v_cache, k_scales, v_scales)
    if k_scales is not None and v_scales is not None:
        sizes.bind("N Hkv B", k_scales=k_scales, v_scales=v_scales)
    check_options(batch, sizes["B"], scale, window, softcap)
    if sizes["T"] != batch.num_tokens:
        raise KernelInputError(f"q has T={sizes['T']}: must be {batch.num_tokens}, the batch's tokens")
    if sizes["Hkv"] < 1 or sizes["Hq"] % sizes["Hkv"]:
        raise KernelInputError(f"q has Hq={sizes['Hq']}: must be a multiple of Hkv={sizes['Hkv']}")
    if batch.end_block > sizes["N"]:
        raise KernelInputError(f"block_tables holds {batch.end_block - 1}: must be below {sizes['N']}, the cache's blocks")
    out = q.new_empty(sizes["T"], sizes["Hq"], sizes["Dv"])
    if not out.numel():
        return out
    grouped = sizes["Hq"] // sizes["Hkv"]
    wide = max(sizes["Dk"], sizes["Dv"])
    head_class, chosen = attention_launch(target or target_of(q), q.dtype, wide, is_decode=not batch.has_chunks)
    rows = max(chosen.rows, triton.next_power_of_2(grouped))
    tables, starts, lens = batch.integers()
    arguments = (
        q, k_cache, v_cache, out, tables, starts, lens, sinks, k_scales, v_scales,
        len(lens), float(scale), float(softcap), window or _NO_WINDOW, sizes["B"], grouped, sizes["Dk"], sizes["Dv"],
        q.stride(0), q.stride(1), out.stride(0), out.stride(1), tables.stride(0),
        *k_cache.stride()[:3], *v_cache.stride()[:3],
        k_scales.stride(0) if k_scales is not None else 0, k_scales.stride(1) if k_scales is not None else 0,
    )  # fmt: skip
    constants = {
        "ROWS": rows,
        "TILE": chosen.tile,
        "KEYS": head_class,
        "VALUES": head_class,
        "STAGES": chosen.stages,
        "HAS_SOFTCAP": softcap > 0,
        "HAS_SINKS": sinks is not None,
        "HAS_SCALES": quantised,
        "num_warps": chosen.warps,
        "num_stages": chosen.stages,
    }
    grid = (sizes["T"] // (rows // grouped) + len(lens), sizes["Hkv"])
    if launch is not None:
        launch(_attend, grid, arguments, constants)
    else:
        _attend[grid](*arguments, **constants)
    return out


def _check_formats(q: Tensor, k_cache: Tensor, v_cache: Tensor, k_scales: Tensor | None, v_scales: Tensor | None) -> bool:
    """Whether the caches are quantised; refuses dtypes, gaps and devices that the kernel does not take."""
    for name, tensor in (("q", q), ("k_cache", k_cache), ("v_cache", v_cache)):
        if tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
            raise KernelInputError(f"{name} has stride {tensor.stride(-1)} in its last dimension: must be 1")
        if tensor.device != q.device:
            raise KernelInputError(f"{name} is on {tensor.device}: must be on {q.device}, the device of q")
    quantised = k_scales is not None
    if quantised != (v_scales is not None):
        raise KernelInputError("k_scales and v_scales: must both be given, or neither")
    for name, cache in (("k_cache", k_cache), ("v_cache", v_cache)):
        allowed = (torch.float8_e4m3fn, torch.int8) if quantised else (q.dtype,)
        if cache.dtype not in allowed:
            raise KernelInputError(f"{name} has dtype {cache.dtype}: must be {' or '.join(map(str, allowed))}")
    for name, scales in (("k_scales", k_scales), ("v_scales", v_scales)):
        if scales is not None and (scales.dtype != torch.float32 or not scales.is_contiguous()):
            found = f"{name} has dtype {scales.dtype} and strides {scales.stride()}"
            raise KernelInputError(f"{found}: must be float32 and contiguous")
    return quantised
