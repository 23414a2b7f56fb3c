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
from .context_parts import PART, ContextParts
from .input_checks import check_attention, check_compact, check_near, check_single_queries
from .launch_table import Launch, attention_launch, target_of
from .shapes import Sizes
from .triton_tiles import LOG2_E, NO_WINDOW, attend_tiles, load_queries


@triton.jit(do_not_specialize=["num_seqs", "window", "block_size", "grouped", "table_row"])
def _decode(
    q_ptr, k_ptr, v_ptr, out_ptr, table_ptr, starts_ptr, lens_ptr, begin_ptr, part_ptr, first_ptr, sink_ptr, slope_ptr,
    k_scale_ptr, v_scale_ptr, sums_ptr, weights_ptr, counter_ptr,
    num_seqs, scale, softcap, window, block_size, grouped, key_width, value_width,
    q_token, q_head, out_token, out_head, table_row, k_block, k_head, k_slot, v_block, v_head, v_slot, scale_block, scale_head,
    ROWS: tl.constexpr, TILE: tl.constexpr, KEYS: tl.constexpr, VALUES: tl.constexpr, STAGES: tl.constexpr, PART: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr, HAS_SINKS: tl.constexpr, HAS_SLOPES: tl.constexpr, HAS_SCALES: tl.constexpr,
):  # fmt: skip
    """One program: one sequence's query, with the query heads of one KV head, over one part of what it sees."""
    number = tl.program_id(0)
    kv_head = tl.program_id(1)
    wide_head = kv_head.to(tl.int64)
    sequence = tl.load(part_ptr + number)
    if sequence < num_seqs:
        part = number - tl.load(first_ptr + 2 * sequence)
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
            value_d = tl.arange(0, VALUES)
            is_value = value_d < value_width
            q_rows = start.to(tl.int64) * q_token + head * q_head
            q, slope, maximum, total, sums = load_queries(
                q_ptr, q_rows, head, slope_ptr, is_row, key_width, ROWS, KEYS, VALUES, HAS_SLOPES
            )
            scales = wide_head * scale_head
            maximum, total, sums = attend_tiles(
                q, maximum, total, sums, length - 1 + row * 0, slope,
                table_ptr + sequence.to(tl.int64) * table_row, k_ptr + wide_head * k_head, v_ptr + wide_head * v_head,
                k_scale_ptr + scales if HAS_SCALES else k_scale_ptr, v_scale_ptr + scales if HAS_SCALES else v_scale_ptr,
                begin, begin, end, scale, softcap, window, block_size, key_width, value_width,
                k_block, k_slot, v_block, v_slot, scale_block,
                TILE, KEYS, VALUES, STAGES,
                CAUSAL=False, HAS_SOFTCAP=HAS_SOFTCAP, HAS_SLOPES=HAS_SLOPES, HAS_SCALES=HAS_SCALES,
            )  # fmt: skip
            is_last = before + used <= 1
            if before + used > 1:
                heads = tl.num_programs(1).to(tl.int64)
                place = tl.load(first_ptr + 2 * sequence + 1)
                mine = ((place + before + part) * heads + kv_head) * grouped + row
                tl.store(sums_ptr + mine[:, None] * VALUES + value_d[None, :], sums, mask=is_row[:, None])
                tl.store(weights_ptr + 2 * mine, maximum, mask=is_row)
                tl.store(weights_ptr + 2 * mine + 1, total, mask=is_row)
                # All that this program has stored is to be seen by the one that counts last.
                tl.debug_barrier()
                counter = counter_ptr + sequence * heads + kv_head
                is_last = tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu") == used - 1
                if is_last:
                    tl.store(counter, 0)
                    maximum = tl.full([ROWS], float("-inf"), tl.float32)
                    total = tl.zeros([ROWS], tl.float32)
                    sums = tl.zeros([ROWS, VALUES], tl.float32)
                    for other in range(before + used):
                        theirs = ((place + other) * heads + kv_head) * grouped + row
                        # Past the first-level cache, which may hold what lay there before.
                        top = tl.load(weights_ptr + 2 * theirs, mask=is_row, other=0.0, cache_modifier=".cg")
                        their_total = tl.load(weights_ptr + 2 * theirs + 1, mask=is_row, other=0.0, cache_modifier=".cg")
                        at = sums_ptr + theirs[:, None] * VALUES + value_d[None, :]
                        their_sums = tl.load(at, mask=is_row[:, None], other=0.0, cache_modifier=".cg")
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
    """Where the parts of one launch leave what they found: for each place, KV head and query head of it."""

    chosen: Launch
    head_class: int
    rows: int  # of a query tile
    sums: Tensor  # [places * Hq, head class] float32
    weights: Tensor  # [places * Hq, 2] float32: the maximum and the sum
    counters: Tensor  # [S * Hkv] int32: parts that are done; 0 between launches


class DecodeScratch:
    """Memory for the parts of one launch at a time, kept from launch to launch."""

    def __init__(self) -> None:
        self._counters: Tensor | None = None
        self._numbers: Tensor | None = None

    @property
    def num_bytes(self) -> int:
        """What it holds now."""
        return sum(tensor.nbytes for tensor in (self._counters, self._numbers) if tensor is not None)

    def take(self, q: Tensor, sizes: Sizes, num_seqs: int, num_places: int, target: str) -> Partials:
        """For `num_places` parts of `num_seqs` sequences."""
        head_class, chosen = attention_launch(target, q.dtype, max(sizes["Dk"], sizes["Dv"]), is_decode=True)
        rows = max(chosen.rows, triton.next_power_of_2(sizes["Hq"] // sizes["Hkv"]))
        pairs, lines = num_seqs * sizes["Hkv"], num_places * sizes["Hq"]
        if self._counters is None or self._counters.numel() < pairs or self._counters.device != q.device:
            self._counters = torch.zeros(pairs, dtype=torch.int32, device=q.device)
        numbers = self._numbers
        if numbers is None or numbers.numel() < lines * (head_class + 2) or numbers.device != q.device:
            numbers = torch.empty(lines * (head_class + 2), dtype=torch.float32, device=q.device)
            self._numbers = numbers
        end = lines * head_class
        sums, weights = numbers[:end].view(lines, head_class), numbers[end : end + 2 * lines].view(lines, 2)
        return Partials(chosen, head_class, rows, sums, weights, self._counters)


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
    k_scales: Tensor | None = None,
    v_scales: Tensor | None = None,
    scratch: DecodeScratch | None = None,
    target: str | None = None,
) -> BoundLaunch:
    """`paged_decode` over these tensors, checked and ready to be launched.

    Hand in the same `scratch` for every launch of a stream; scales and `target` as in `triton_attention.bind_attention`.
    """
    options: dict[str, Any] = {"scale": scale, "window": window, "softcap": softcap, "sinks": sinks, "slopes": slopes}
    options |= {"k_scales": k_scales, "v_scales": v_scales}
    sizes = check_attention(q, k_cache, v_cache, batch, **options)
    check_single_queries(batch)
    check_compact(q=q, k_cache=k_cache, v_cache=v_cache, sinks=sinks, slopes=slopes)
    check_near(q=(q, 1), k_cache=(k_cache, 2), v_cache=(v_cache, 2))
    out = q.new_empty(sizes["T"], sizes["Hq"], sizes["Dv"])
    if not out.numel():
        return BoundLaunch(out, ())
    parts = batch.parts(window)
    partials = (scratch or DecodeScratch()).take(q, sizes, len(batch.seq_lens), parts.num_places, target or target_of(q))
    return BoundLaunch(out, (join_parts(q, k_cache, v_cache, out, batch, sizes, parts, partials, **options),))


def join_parts(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    out: Tensor,
    batch: AttentionBatch,
    sizes: Sizes,
    parts: ContextParts,
    partials: Partials,
    *,
    scale: float,
    window: int,
    softcap: float,
    sinks: Tensor | None,
    slopes: Tensor | None,
    k_scales: Tensor | None = None,
    v_scales: Tensor | None = None,
    begins: Tensor | None = None,
) -> KernelLaunch:
    """The launch that attends the parts of each context from `begins` [S] on, and joins all: those before lie in `partials`."""
    tables, starts, lens = batch.integers()
    arguments = (
        q, k_cache, v_cache, out, tables, starts, lens, begins, parts.sequences, parts.firsts, sinks, slopes,
        k_scales, v_scales, partials.sums, partials.weights, partials.counters,
        len(lens), float(scale), float(softcap), window or NO_WINDOW, sizes["B"], sizes["Hq"] // sizes["Hkv"],
        sizes["Dk"], sizes["Dv"],
        q.stride(0), q.stride(1), out.stride(0), out.stride(1), tables.stride(0), *k_cache.stride()[:3], *v_cache.stride()[:3],
        k_scales.stride(0) if k_scales is not None else 0, k_scales.stride(1) if k_scales is not None else 0,
    )  # fmt: skip
    constants = partials.chosen.constants(partials.rows, partials.head_class) | {
        "PART": PART,
        "HAS_SOFTCAP": softcap > 0,
        "HAS_SINKS": sinks is not None,
        "HAS_SLOPES": slopes is not None,
        "HAS_SCALES": k_scales is not None,
    }
    return KernelLaunch(_decode, (len(parts.sequences), sizes["Hkv"]), arguments, constants)
