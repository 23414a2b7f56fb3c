"""Single queries over long contexts, in Triton: cut into parts that run side by side and are joined in the same launch.

Before: `store_kv` of the same step. After: the layer's output projection. Always: what `triton_attention.paged_attention`
promises, for batches in which no sequence has more than one query; where a context is cut depends on its own length alone, so
an answer does not depend on the rest of the batch. The part that ends last joins them, and sets its counter back to 0 for the
next launch.
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
PART = 512
"""Positions of a part."""

Launcher = Callable[..., Any]


@triton.jit(do_not_specialize=["window", "block_size", "grouped", "parts"])
def _decode(
    q_ptr, k_ptr, v_ptr, out_ptr, table_ptr, starts_ptr, lens_ptr, sink_ptr, sums_ptr, weights_ptr, counter_ptr,
    scale, softcap, window, block_size, grouped, parts, key_width, value_width,
    q_token, q_head, out_token, out_head, table_row, k_block, k_head, k_slot, v_block, v_head, v_slot,
    ROWS: tl.constexpr, TILE: tl.constexpr, KEYS: tl.constexpr, VALUES: tl.constexpr, STAGES: tl.constexpr,
    PART: tl.constexpr, HAS_SOFTCAP: tl.constexpr, HAS_SINKS: tl.constexpr,
):  # fmt: skip
    """One program: one sequence's query, with the query heads of one KV head, over one part of what it sees."""
    sequence = tl.program_id(0)
    kv_head = tl.program_id(1)
    part = tl.program_id(2)
    start = tl.load(starts_ptr + sequence)
    length = tl.load(lens_ptr + sequence)
    lowest = tl.maximum(length - window, 0)
    used = tl.cdiv(length - lowest, PART)
    if (tl.load(starts_ptr + sequence + 1) > start) & (part < used):
        begin = lowest + part * PART
        end = tl.minimum(begin + PART, length)
        row = tl.arange(0, ROWS)
        is_row = row < grouped
        head = kv_head * grouped + row
        column = tl.arange(0, TILE)
        key_d = tl.arange(0, KEYS)
        value_d = tl.arange(0, VALUES)
        is_key = key_d < key_width
        is_value = value_d < value_width
        q_rows = start.to(tl.int64) * q_token + head * q_head
        q = tl.load(q_ptr + q_rows[:, None] + key_d[None, :], mask=is_row[:, None] & is_key[None, :], other=0.0)
        maximum = tl.full([ROWS], float("-inf"), tl.float32)
        total = tl.zeros([ROWS], tl.float32)
        sums = tl.zeros([ROWS, VALUES], tl.float32)
        table = table_ptr + sequence.to(tl.int64) * table_row
        at = begin + column
        pages = tl.load(table + at // block_size, mask=at < end, other=0)
        for tile in tl.range(begin, end, TILE, num_stages=STAGES):
            at = tile + column
            is_column = at < end
            page = pages.to(tl.int64)
            later = at + TILE
            pages = tl.load(table + later // block_size, mask=later < end, other=0)
            slot = at % block_size
            k_rows = page * k_block + kv_head * k_head + slot * k_slot
            v_rows = page * v_block + kv_head * v_head + slot * v_slot
            k = tl.load(k_ptr + k_rows[None, :] + key_d[:, None], mask=is_column[None, :] & is_key[:, None], other=0.0)
            scores = tl.dot(q, k, input_precision="ieee") * scale
            if HAS_SOFTCAP:
                scores = softcap * (1.0 - 2.0 / (tl.exp2(scores * (2.0 * _LOG2_E) / softcap) + 1.0))
            scores = tl.where(is_column[None, :], scores * _LOG2_E, float("-inf"))
            new = tl.maximum(maximum, tl.max(scores, 1))
            weights = tl.exp2(scores - new[:, None])
            correction = tl.exp2(maximum - new)
            total = total * correction + tl.sum(weights, 1)
            v = tl.load(v_ptr + v_rows[:, None] + value_d[None, :], mask=is_column[:, None] & is_value[None, :], other=0.0)
            sums = sums * correction[:, None] + tl.dot(weights.to(q.dtype), v, input_precision="ieee")
            maximum = new
        pair = sequence.to(tl.int64) * tl.num_programs(1) + kv_head
        is_last = used == 1
        if used > 1:
            mine = (pair * parts + part) * ROWS + row
            tl.store(sums_ptr + mine[:, None] * VALUES + value_d[None, :], sums)
            tl.store(weights_ptr + 2 * mine, maximum)
            tl.store(weights_ptr + 2 * mine + 1, total)
            # All that this program has stored is to be seen by the one that counts last.
            tl.debug_barrier()
            is_last = tl.atomic_add(counter_ptr + pair, 1, sem="acq_rel", scope="gpu") == used - 1
            if is_last:
                tl.store(counter_ptr + pair, 0)
                maximum = tl.full([ROWS], float("-inf"), tl.float32)
                total = tl.zeros([ROWS], tl.float32)
                sums = tl.zeros([ROWS, VALUES], tl.float32)
                for other in range(used):
                    theirs = (pair * parts + other) * ROWS + row
                    # Past the first-level cache, which may hold what lay there before.
                    top = tl.load(weights_ptr + 2 * theirs, cache_modifier=".cg")
                    their_total = tl.load(weights_ptr + 2 * theirs + 1, cache_modifier=".cg")
                    their_sums = tl.load(sums_ptr + theirs[:, None] * VALUES + value_d[None, :], cache_modifier=".cg")
                    new = tl.maximum(maximum, top)
                    ours = tl.exp2(maximum - new)
                    weight = tl.exp2(top - new)
                    total = total * ours + their_total * weight
                    sums = sums * ours[:, None] + their_sums * weight[:, None]
                    maximum = new
        if is_last:
            if HAS_SINKS:
                sink = tl.load(sink_ptr + head, mask=is_row, other=0.0).to(tl.float32) * _LOG2_E
                total = total + tl.exp2(sink - maximum)
            out_rows = start.to(tl.int64) * out_token + head * out_head
            answers = (sums / total[:, None]).to(out_ptr.dtype.element_ty)
            tl.store(out_ptr + out_rows[:, None] + value_d[None, :], answers, mask=is_row[:, None] & is_value[None, :])


class DecodeScratch:
    """Memory for the parts of one launch at a time, kept from launch to launch; the counters are 0 between launches."""

    def __init__(self) -> None:
        self._counters: Tensor | None = None
        self._numbers: Tensor | None = None

    def take(self, pairs: int, parts: int, rows: int, width: int, like: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Sums [pairs * parts * rows, width], weights [pairs * parts * rows, 2] float32 and counters [pairs] int32."""
        lines = pairs * parts * rows
        if self._counters is None or self._counters.numel() < pairs or self._counters.device != like.device:
            self._counters = torch.zeros(pairs, dtype=torch.int32, device=like.device)
        numbers = self._numbers
        if numbers is None or numbers.numel() < lines * (width + 2) or numbers.device != like.device:
            numbers = torch.empty(lines * (width + 2), dtype=torch.float32, device=like.device)
            self._numbers = numbers
        return numbers[: lines * width], numbers[lines * width :], self._counters


@torch.no_grad()
def paged_decode(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    batch: AttentionBatch,
    *,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    scratch: DecodeScratch | None = None,
    target: str | None = None,
    launch: Launcher | None = None,
) -> Tensor:
    """As `reference.paged_attention`, for a batch whose sequences have at most one query each.

    Hand in the same `scratch` at every launch of a stream; `target` and `launch` as in `triton_attention.paged_attention`.
    Raises `ShapeError` and `KernelInputError`.
    """
    sizes = bind("T Hq Dk", q=q).bind("N Hkv B Dk", k_cache=k_cache).bind("N Hkv B Dv", v_cache=v_cache)
    if sinks is not None:
        sizes.bind("Hq", sinks=sinks)
    check_options(batch, sizes["B"], scale, window, softcap)
    if batch.has_chunks:
        raise KernelInputError("query_starts has a sequence with more than one query: must have at most one each")
    if sizes["T"] != batch.num_tokens:
        raise KernelInputError(f"q has T={sizes['T']}: must be {batch.num_tokens}, the batch's tokens")
    if sizes["Hkv"] < 1 or sizes["Hq"] % sizes["Hkv"]:
        raise KernelInputError(f"q has Hq={sizes['Hq']}: must be a multiple of Hkv={sizes['Hkv']}")
    if batch.end_block > sizes["N"]:
        raise KernelInputError(f"block_tables holds {batch.end_block - 1}: must be below {sizes['N']}, the cache's blocks")
    for name, tensor in (("q", q), ("k_cache", k_cache), ("v_cache", v_cache)):
        if tensor.dtype != q.dtype:
            raise KernelInputError(f"{name} has dtype {tensor.dtype}: must be {q.dtype}, the dtype of q")
        if tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
            raise KernelInputError(f"{name} has stride {tensor.stride(-1)} in its last dimension: must be 1")
    out = q.new_empty(sizes["T"], sizes["Hq"], sizes["Dv"])
    if not out.numel():
        return out
    grouped = sizes["Hq"] // sizes["Hkv"]
    wide = max(sizes["Dk"], sizes["Dv"])
    head_class, chosen = attention_launch(target or target_of(q), q.dtype, wide, is_decode=True)
    rows = max(chosen.rows, triton.next_power_of_2(grouped))
    tables, starts, lens = batch.integers()
    longest = max(batch.seq_lens)
    parts = triton.cdiv(min(longest, window) if window else longest, PART)
    sums, weights, counters = (scratch or DecodeScratch()).take(len(lens) * sizes["Hkv"], parts, rows, head_class, q)
    arguments = (
        q, k_cache, v_cache, out, tables, starts, lens, sinks, sums, weights, counters,
        float(scale), float(softcap), window or _NO_WINDOW, sizes["B"], grouped, parts, sizes["Dk"], sizes["Dv"],
        q.stride(0), q.stride(1), out.stride(0), out.stride(1), tables.stride(0), *k_cache.stride()[:3], *v_cache.stride()[:3],
    )  # fmt: skip
    constants = {
        "ROWS": rows,
        "TILE": chosen.tile,
        "KEYS": head_class,
        "VALUES": head_class,
        "STAGES": chosen.stages,
        "PART": PART,
        "HAS_SOFTCAP": softcap > 0,
        "HAS_SINKS": sinks is not None,
        "num_warps": chosen.warps,
        "num_stages": chosen.stages,
    }
    grid = (len(lens), sizes["Hkv"], parts)
    if launch is not None:
        launch(_decode, grid, arguments, constants)
    else:
        _decode[grid](*arguments, **constants)
    return out
