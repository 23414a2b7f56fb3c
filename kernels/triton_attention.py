"""Paged attention for GPUs, in Triton: one kernel for prompts' chunks, decodes and mixtures of them.

Before: `store_kv` of the same step. After: the layer's output projection. Always: what `reference.paged_attention` promises,
but that a row that is not finite may spoil queries of its own sequence that stand before it in the same tile.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from .attention_batch import AttentionBatch
from .bound_launch import BoundLaunch, KernelLaunch, Launcher
from .input_checks import check_attention, check_compact, check_near
from .launch_table import attention_launch, target_of
from .triton_tiles import LOG2_E, NO_WINDOW, attend_tiles, load_queries


@triton.jit(do_not_specialize=["num_seqs", "window", "block_size", "grouped", "table_row"])
def _attend(
    q_ptr, k_ptr, v_ptr, out_ptr, table_ptr, starts_ptr, lens_ptr, sink_ptr, slope_ptr, k_scale_ptr, v_scale_ptr,
    num_seqs, scale, softcap, window, block_size, grouped, key_width, value_width,
    q_token, q_head, out_token, out_head, table_row,
    k_block, k_head, k_slot, v_block, v_head, v_slot, scale_block, scale_head,
    ROWS: tl.constexpr, TILE: tl.constexpr, KEYS: tl.constexpr, VALUES: tl.constexpr, STAGES: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr, HAS_SINKS: tl.constexpr, HAS_SLOPES: tl.constexpr, HAS_SCALES: tl.constexpr,
):  # fmt: skip
    """One program: `ROWS // grouped` queries of one sequence with all query heads of one KV head."""
    queries = ROWS // grouped
    block = tl.program_id(0)
    kv_head = tl.program_id(1)
    wide_head = kv_head.to(tl.int64)
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
        value_d = tl.arange(0, VALUES)
        q_rows = (start + query).to(tl.int64) * q_token + head * q_head
        q, slope, maximum, total, sums = load_queries(
            q_ptr, q_rows, head, slope_ptr, is_row, key_width, ROWS, KEYS, VALUES, HAS_SLOPES
        )
        if HAS_SINKS:
            maximum = tl.load(sink_ptr + head, mask=is_row, other=0.0).to(tl.float32) * LOG2_E
            total = tl.full([ROWS], 1.0, tl.float32)
        end = tl.minimum(length, length - count + first + queries)
        lowest = tl.maximum(length - count + first - window + 1, 0)
        scales = wide_head * scale_head
        maximum, total, sums = attend_tiles(
            q, maximum, total, sums, position, slope,
            table_ptr + sequence.to(tl.int64) * table_row, k_ptr + wide_head * k_head, v_ptr + wide_head * v_head,
            k_scale_ptr + scales if HAS_SCALES else k_scale_ptr, v_scale_ptr + scales if HAS_SCALES else v_scale_ptr,
            lowest // TILE * TILE, lowest, end, scale, softcap, window, block_size, key_width, value_width,
            k_block, k_slot, v_block, v_slot, scale_block,
            TILE, KEYS, VALUES, STAGES,
            CAUSAL=True, HAS_SOFTCAP=HAS_SOFTCAP, HAS_SLOPES=HAS_SLOPES, HAS_SCALES=HAS_SCALES,
        )  # fmt: skip
        out_rows = (start + query).to(tl.int64) * out_token + head * out_head
        answers = (sums / total[:, None]).to(out_ptr.dtype.element_ty)
        is_answer = is_row[:, None] & (value_d < value_width)[None, :]
        tl.store(out_ptr + out_rows[:, None] + value_d[None, :], answers, mask=is_answer)


@torch.no_grad()
def paged_attention(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, batch: AttentionBatch, *, launch: Launcher | None = None, **options: Any
) -> Tensor:
    """As `reference.paged_attention`: q [T, Hq, Dk] over the rows of `batch` -> [T, Hq, Dv]; options as in `bind_attention`.

    Raises `ShapeError` and `KernelInputError`.
    """
    return bind_attention(q, k_cache, v_cache, batch, **options)(launch)


def bind_attention(
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
    target: str | None = None,
) -> BoundLaunch:
    """`paged_attention` over these tensors, checked and ready to be launched.

    With `k_scales` and `v_scales` [N, Hkv, B] float32, contiguous, the caches are float8_e4m3fn or int8, and a row is its
    numbers times its scale. `target` is a name of the launch table, for compiling without a GPU.
    """
    options: dict[str, Any] = {"scale": scale, "window": window, "softcap": softcap, "sinks": sinks, "slopes": slopes}
    sizes = check_attention(q, k_cache, v_cache, batch, **options, k_scales=k_scales, v_scales=v_scales)
    check_compact(q=q, k_cache=k_cache, v_cache=v_cache, sinks=sinks, slopes=slopes)
    check_near(q=(q, 1), k_cache=(k_cache, 2), v_cache=(v_cache, 2))
    out = q.new_empty(sizes["T"], sizes["Hq"], sizes["Dv"])
    if not out.numel():
        return BoundLaunch(out, ())
    grouped = sizes["Hq"] // sizes["Hkv"]
    wide = max(sizes["Dk"], sizes["Dv"])
    head_class, chosen = attention_launch(target or target_of(q), q.dtype, wide, is_decode=not batch.has_chunks)
    rows = max(chosen.rows, triton.next_power_of_2(grouped))
    tables, starts, lens = batch.integers()
    arguments = (
        q, k_cache, v_cache, out, tables, starts, lens, sinks, slopes, k_scales, v_scales,
        len(lens), float(scale), float(softcap), window or NO_WINDOW, sizes["B"], grouped, sizes["Dk"], sizes["Dv"],
        q.stride(0), q.stride(1), out.stride(0), out.stride(1), tables.stride(0),
        *k_cache.stride()[:3], *v_cache.stride()[:3],
        k_scales.stride(0) if k_scales is not None else 0, k_scales.stride(1) if k_scales is not None else 0,
    )  # fmt: skip
    constants = chosen.constants(rows, head_class) | {
        "HAS_SOFTCAP": softcap > 0,
        "HAS_SINKS": sinks is not None,
        "HAS_SLOPES": slopes is not None,
        "HAS_SCALES": k_scales is not None,
    }
    grid = (sizes["T"] // (rows // grouped) + len(lens), sizes["Hkv"])
    return BoundLaunch(out, (KernelLaunch(_attend, grid, arguments, constants),))
