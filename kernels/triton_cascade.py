"""Decodes whose shared prefixes are attended once for a whole group, in Triton: two launches, of which the second joins.

Before: `store_kv` of the same step. After: the layer's output projection. Always: what `triton_decode.paged_decode` promises,
but that where a context is cut depends on what is shared; a prefix's keys and values are loaded once for as many members as a
tile of queries holds, part by part.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from .attention_batch import AttentionBatch
from .bound_launch import BoundLaunch, KernelLaunch, Launcher
from .context_parts import PART
from .input_checks import check_attention, check_compact, check_near, check_single_queries
from .launch_table import attention_launch, target_of
from .triton_decode import DecodeScratch, bind_decode, join_parts
from .triton_tiles import NO_WINDOW, attend_tiles, load_queries


@triton.jit(do_not_specialize=["window", "block_size", "grouped", "table_row"])
def _attend_prefixes(
    q_ptr, k_ptr, v_ptr, table_ptr, starts_ptr, lens_ptr, first_ptr, slope_ptr, member_ptr, tile_ptr, sums_ptr, weights_ptr,
    scale, softcap, window, block_size, grouped, key_width, value_width,
    q_token, q_head, table_row, k_block, k_head, k_slot, v_block, v_head, v_slot,
    ROWS: tl.constexpr, TILE: tl.constexpr, KEYS: tl.constexpr, VALUES: tl.constexpr, STAGES: tl.constexpr,
    PART: tl.constexpr, HAS_SOFTCAP: tl.constexpr, HAS_SLOPES: tl.constexpr,
):  # fmt: skip
    """One program: the queries of some members of a group, with the query heads of one KV head, over a part of their prefix."""
    tile = tl.program_id(0)
    kv_head = tl.program_id(1)
    part = tl.program_id(2)
    first = tl.load(tile_ptr + 3 * tile)
    count = tl.load(tile_ptr + 3 * tile + 1)
    positions = tl.load(tile_ptr + 3 * tile + 2)
    begin = part * PART
    if begin < positions:
        end = tl.minimum(begin + PART, positions)
        row = tl.arange(0, ROWS)
        is_row = row // grouped < count
        sequence = tl.load(member_ptr + first + row // grouped, mask=is_row, other=0)
        start = tl.load(starts_ptr + sequence, mask=is_row, other=0)
        # A member without a query is passed over.
        is_row = is_row & (tl.load(starts_ptr + sequence + 1, mask=is_row, other=0) > start)
        position = tl.load(lens_ptr + sequence, mask=is_row, other=1) - 1
        head = kv_head * grouped + row % grouped
        value_d = tl.arange(0, VALUES)
        q_rows = start.to(tl.int64) * q_token + head * q_head
        q, slope, maximum, total, sums = load_queries(
            q_ptr, q_rows, head, slope_ptr, is_row, key_width, ROWS, KEYS, VALUES, HAS_SLOPES
        )
        wide_head = kv_head.to(tl.int64)
        leader = tl.load(member_ptr + first).to(tl.int64)
        maximum, total, sums = attend_tiles(
            q, maximum, total, sums, position, slope,
            table_ptr + leader * table_row, k_ptr + wide_head * k_head, v_ptr + wide_head * v_head, None, None,
            begin, begin, end, scale, softcap, window, block_size, key_width, value_width,
            k_block, k_slot, v_block, v_slot, 0,
            TILE, KEYS, VALUES, STAGES,
            CAUSAL=False, HAS_SOFTCAP=HAS_SOFTCAP, HAS_SLOPES=HAS_SLOPES, HAS_SCALES=False,
        )  # fmt: skip
        place = tl.load(first_ptr + 2 * sequence + 1, mask=is_row, other=0).to(tl.int64)
        mine = ((place + part) * tl.num_programs(1) + kv_head) * grouped + row % grouped
        tl.store(sums_ptr + mine[:, None] * VALUES + value_d[None, :], sums, mask=is_row[:, None])
        tl.store(weights_ptr + 2 * mine, maximum, mask=is_row)
        tl.store(weights_ptr + 2 * mine + 1, total, mask=is_row)


@torch.no_grad()
def cascade_decode(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, batch: AttentionBatch, *, launch: Launcher | None = None, **options: Any
) -> Tensor:
    """As `cascade.cascade_decode`; options as in `bind_cascade`. Raises `ShapeError` and `KernelInputError`."""
    return bind_cascade(q, k_cache, v_cache, batch, **options)(launch)


def bind_cascade(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    batch: AttentionBatch,
    *,
    scale: float,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    slopes: Tensor | None = None,
    scratch: DecodeScratch | None = None,
    target: str | None = None,
) -> BoundLaunch:
    """`cascade_decode` over these tensors, checked and ready to be launched; the rest as in `triton_decode.bind_decode`."""
    options: dict[str, Any] = {"scale": scale, "softcap": softcap, "sinks": sinks, "slopes": slopes}
    prefixes, target = batch.prefixes, target or target_of(q)
    if prefixes is None or not prefixes.members:
        return bind_decode(q, k_cache, v_cache, batch, **options, scratch=scratch, target=target)
    sizes = check_attention(q, k_cache, v_cache, batch, **options)
    check_single_queries(batch)
    check_compact(q=q, k_cache=k_cache, v_cache=v_cache, sinks=sinks, slopes=slopes)
    check_near(q=(q, 1), k_cache=(k_cache, 2), v_cache=(v_cache, 2))
    out = q.new_empty(sizes["T"], sizes["Hq"], sizes["Dv"])
    if not out.numel():
        return BoundLaunch(out, ())
    parts = batch.rests(prefixes)
    partials = (scratch or DecodeScratch()).take(q, sizes, len(batch.seq_lens), parts.num_places, target)
    head_class, chosen = attention_launch(target, q.dtype, max(sizes["Dk"], sizes["Dv"]), is_decode=False)
    grouped = sizes["Hq"] // sizes["Hkv"]
    rows = max(chosen.rows, triton.next_power_of_2(grouped))
    members, tiles = prefixes.tiles(rows // grouped, q.device)
    tables, starts, lens = batch.integers()
    arguments = (
        q, k_cache, v_cache, tables, starts, lens, parts.firsts, slopes, members, tiles, partials.sums, partials.weights,
        float(scale), float(softcap), NO_WINDOW, sizes["B"], grouped, sizes["Dk"], sizes["Dv"],
        q.stride(0), q.stride(1), tables.stride(0), *k_cache.stride()[:3], *v_cache.stride()[:3],
    )  # fmt: skip
    constants = chosen.constants(rows, head_class) | {
        "PART": PART,
        "HAS_SOFTCAP": softcap > 0,
        "HAS_SLOPES": slopes is not None,
    }
    grid = (len(tiles), sizes["Hkv"], triton.cdiv(max(prefixes.positions), PART))
    shared = KernelLaunch(_attend_prefixes, grid, arguments, constants)
    begins = prefixes.begin_tensor(q.device)
    own = join_parts(q, k_cache, v_cache, out, batch, sizes, parts, partials, **options, window=0, begins=begins)
    return BoundLaunch(out, (shared, own))
