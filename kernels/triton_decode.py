"""Single queries over long contexts, in Triton: cut into parts that run side by side and are joined in the same launch.

Before: `store_kv` of the same step. After: the layer's output projection. Always: what `triton_attention.paged_attention`
promises, for batches in which no sequence has more than one query; where a context is cut depends on its own length alone, so
an answer does not depend on the rest of the batch. The part that ends last joins them, and sets its counter back to 0 for the
next launch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from .attention_batch import AttentionBatch
from .bound_launch import BoundLaunch, KernelLaunch, Launcher
from .input_checks import check_attention, check_compact, check_single_queries
from .launch_table import Launch, attention_launch, target_of
from .shapes import Sizes
from .triton_tiles import LOG2_E, NO_WINDOW, attend_tiles

PART = 512
"""Positions of a part."""


@triton.jit(do_not_specialize=["window", "block_size", "grouped", "parts", "table_row"])
def _decode(
    q_ptr, k_ptr, v_ptr, out_ptr, table_ptr, starts_ptr, lens_ptr, begin_ptr, sink_ptr, slope_ptr,
    sums_ptr, weights_ptr, counter_ptr,
    scale, softcap, window, block_size, grouped, parts, key_width, value_width,
    q_token, q_head, out_token, out_head, table_row, k_block, k_head, k_slot, v_block, v_head, v_slot,
    ROWS: tl.constexpr, TILE: tl.constexpr, KEYS: tl.constexpr, VALUES: tl.constexpr, STAGES: tl.constexpr,
    PART: tl.constexpr, HAS_SOFTCAP: tl.constexpr, HAS_SINKS: tl.constexpr, HAS_SLOPES: tl.constexpr,
):  # fmt: skip
    """One program: one sequence's query, with the query heads of one KV head, over one part of what it sees."""
    sequence = tl.program_id(0)
    kv_head = tl.program_id(1)
    wide_head = kv_head.to(tl.int64)
    part = tl.program_id(2)
    start = tl.load(starts_ptr + sequence)
    length = tl.load(lens_ptr + sequence)
    lowest = tl.maximum(length - window, 0)
    # Parts that were attended before this launch, and what they left.
    before = 0
    if begin_ptr is not None:
        lowest = tl.load(begin_ptr + sequence)
        before = tl.cdiv(lowest, PART)
    used = tl.cdiv(length - lowest, PART)
    # A query that sees nothing, of a padded row, is answered with zeros by its first part.
    if (tl.load(starts_ptr + sequence + 1) > start) & (part < tl.maximum(used, 1)):
        begin = lowest + part * PART
        end = tl.minimum(begin + PART, length)
        row = tl.arange(0, ROWS)
        is_row = row < grouped
        head = kv_head * grouped + row
        key_d = tl.arange(0, KEYS)
        value_d = tl.arange(0, VALUES)
        is_value = value_d < value_width
        q_rows = start.to(tl.int64) * q_token + head * q_head
        q = tl.load(q_ptr + q_rows[:, None] + key_d[None, :], mask=is_row[:, None] & (key_d < key_width)[None, :], other=0.0)
        maximum = tl.full([ROWS], float("-inf"), tl.float32)
        total = tl.zeros([ROWS], tl.float32)
        sums = tl.zeros([ROWS, VALUES], tl.float32)
        slope = total
        if HAS_SLOPES:
            slope = tl.load(slope_ptr + head, mask=is_row, other=0.0).to(tl.float32)
        maximum, total, sums = attend_tiles(
            q, maximum, total, sums, length - 1 + row * 0, slope,
            table_ptr + sequence.to(tl.int64) * table_row, k_ptr + wide_head * k_head, v_ptr + wide_head * v_head, None, None,
            begin, begin, end, scale, softcap, window, block_size, key_width, value_width,
            k_block, k_slot, v_block, v_slot, 0,
            TILE, KEYS, VALUES, STAGES,
            CAUSAL=False, HAS_SOFTCAP=HAS_SOFTCAP, HAS_SLOPES=HAS_SLOPES, HAS_SCALES=False,
        )  # fmt: skip
        pair = sequence.to(tl.int64) * tl.num_programs(1) + kv_head
        is_last = before + used <= 1
        if before + used > 1:
            mine = (pair * parts + before + part) * ROWS + row
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
                for other in range(before + used):
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
                sink = tl.load(sink_ptr + head, mask=is_row, other=0.0).to(tl.float32) * LOG2_E
                total = total + tl.exp2(sink - maximum)
            out_rows = start.to(tl.int64) * out_token + head * out_head
            answers = tl.where(total > 0.0, 1.0 / total, 0.0)[:, None] * sums
            answers = answers.to(out_ptr.dtype.element_ty)
            tl.store(out_ptr + out_rows[:, None] + value_d[None, :], answers, mask=is_row[:, None] & is_value[None, :])


@dataclass(frozen=True, slots=True)
class Partials:
    """Where the parts of one launch leave what they found, [sequences * Hkv * parts * rows] of each."""

    chosen: Launch
    head_class: int
    rows: int  # of one part's query tile
    parts: int  # of one sequence at most
    sums: Tensor  # [..., head class] float32
    weights: Tensor  # [..., 2] float32: the maximum and the sum
    counters: Tensor  # [sequences * Hkv] int32: parts that are done; 0 between launches


class DecodeScratch:
    """Memory for the parts of one launch at a time, kept from launch to launch."""

    def __init__(self) -> None:
        self._counters: Tensor | None = None
        self._numbers: Tensor | None = None

    def take(self, q: Tensor, sizes: Sizes, num_seqs: int, parts: int, target: str) -> Partials:
        """For up to `parts` parts of each of `num_seqs` sequences."""
        head_class, chosen = attention_launch(target, q.dtype, max(sizes["Dk"], sizes["Dv"]), is_decode=True)
        rows = max(chosen.rows, triton.next_power_of_2(sizes["Hq"] // sizes["Hkv"]))
        pairs = num_seqs * sizes["Hkv"]
        if self._counters is None or self._counters.numel() < pairs or self._counters.device != q.device:
            self._counters = torch.zeros(pairs, dtype=torch.int32, device=q.device)
        lines, numbers = pairs * parts * rows, self._numbers
        if numbers is None or numbers.numel() < lines * (head_class + 2) or numbers.device != q.device:
            numbers = torch.empty(lines * (head_class + 2), dtype=torch.float32, device=q.device)
            self._numbers = numbers
        end = lines * head_class
        return Partials(chosen, head_class, rows, parts, numbers[:end], numbers[end:], self._counters)


@torch.no_grad()
def paged_decode(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, batch: AttentionBatch, *, launch: Launcher | None = None, **options: Any
) -> Tensor:
    """As `reference.paged_attention`, for a batch whose sequences have at most one query each; options as in `bind_decode`.

    Raises `ShapeError` and `KernelInputError`.
    """
    return bind_decode(q, k_cache, v_cache, batch, **options)(launch)


def bind_decode(
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
    scratch: DecodeScratch | None = None,
    target: str | None = None,
) -> BoundLaunch:
    """`paged_decode` over these tensors, checked and ready to be launched.

    Hand in the same `scratch` for every launch of a stream; `target` as in `triton_attention.bind_attention`.
    """
    options: dict[str, Any] = {"scale": scale, "window": window, "softcap": softcap, "sinks": sinks, "slopes": slopes}
    sizes = check_attention(q, k_cache, v_cache, batch, **options)
    check_single_queries(batch)
    check_compact(q=q, k_cache=k_cache, v_cache=v_cache)
    out = q.new_empty(sizes["T"], sizes["Hq"], sizes["Dv"])
    if not out.numel():
        return BoundLaunch(out, ())
    longest = max(batch.seq_lens)
    parts = triton.cdiv(min(longest, window) if window else longest, PART)
    partials = (scratch or DecodeScratch()).take(q, sizes, len(batch.seq_lens), parts, target or target_of(q))
    return BoundLaunch(out, (join_parts(q, k_cache, v_cache, out, batch, sizes, partials, **options),))


def join_parts(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    out: Tensor,
    batch: AttentionBatch,
    sizes: Sizes,
    partials: Partials,
    *,
    scale: float,
    window: int,
    softcap: float,
    sinks: Tensor | None,
    slopes: Tensor | None,
    begins: Tensor | None = None,
) -> KernelLaunch:
    """The launch that attends the parts of each context from `begins` [S] on, and joins all: those before lie in `partials`."""
    tables, starts, lens = batch.integers()
    arguments = (
        q, k_cache, v_cache, out, tables, starts, lens, begins, sinks, slopes,
        partials.sums, partials.weights, partials.counters,
        float(scale), float(softcap), window or NO_WINDOW, sizes["B"], sizes["Hq"] // sizes["Hkv"], partials.parts,
        sizes["Dk"], sizes["Dv"],
        q.stride(0), q.stride(1), out.stride(0), out.stride(1), tables.stride(0), *k_cache.stride()[:3], *v_cache.stride()[:3],
    )  # fmt: skip
    constants = partials.chosen.constants(partials.rows, partials.head_class) | {
        "PART": PART,
        "HAS_SOFTCAP": softcap > 0,
        "HAS_SINKS": sinks is not None,
        "HAS_SLOPES": slopes is not None,
    }
    return KernelLaunch(_decode, (len(lens), sizes["Hkv"], partials.parts), arguments, constants)
