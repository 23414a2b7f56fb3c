"""What every attention kernel in Triton does: it loads its queries, and goes tile by tile over positions in blocks.

Before: a program knows which queries are its own, and the positions that they see. After: the weighted sums, the sum of the
weights and the maximum that both are relative to, which partial results are joined by. Always: a position that no query of the
program sees is never loaded; offsets are 64-bit; the page ids of a tile are loaded one tile ahead, so that its keys and values
are on their way while the one before is multiplied.
"""

from __future__ import annotations

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)
NO_WINDOW = 2**30
"""A window that everything is in."""


@triton.jit
def load_queries(
    q_ptr, rows, head, slope_ptr, is_row, key_width,
    ROWS: tl.constexpr, KEYS: tl.constexpr, VALUES: tl.constexpr, HAS_SLOPES: tl.constexpr,
):  # fmt: skip
    """Queries at `rows` with the slopes of their heads, and a softmax over nothing yet: q, slope, maximum, total, sums."""
    key_d = tl.arange(0, KEYS)
    q = tl.load(q_ptr + rows[:, None] + key_d[None, :], mask=is_row[:, None] & (key_d < key_width)[None, :], other=0.0)
    maximum = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    sums = tl.zeros([ROWS, VALUES], tl.float32)
    slope = total
    if HAS_SLOPES:
        slope = tl.load(slope_ptr + head, mask=is_row, other=0.0).to(tl.float32)
    return q, slope, maximum, total, sums


@triton.jit
def attend_tiles(
    q, maximum, total, sums, position, slope,
    table_ptr, k_ptr, v_ptr, k_scale_ptr, v_scale_ptr,
    begin, lowest, end, scale, softcap, window, block_size, key_width, value_width,
    k_block, k_slot, v_block, v_slot, scale_block,
    TILE: tl.constexpr, KEYS: tl.constexpr, VALUES: tl.constexpr, STAGES: tl.constexpr,
    CAUSAL: tl.constexpr, HAS_SOFTCAP: tl.constexpr, HAS_SLOPES: tl.constexpr, HAS_SCALES: tl.constexpr,
):  # fmt: skip
    """Adds the positions [lowest, end) of one sequence's table, tile by tile from `begin` on, to the sums of the rows of q.

    Pointers are those of one KV head. maximum and total [rows] are of base 2. With CAUSAL a row sees what its position and the
    window let it see, otherwise all of it; then no row's maximum may be without a position.
    """
    column = tl.arange(0, TILE)
    key_d = tl.arange(0, KEYS)
    value_d = tl.arange(0, VALUES)
    is_key = key_d < key_width
    is_value = value_d < value_width
    at = begin + column
    pages = tl.load(table_ptr + at // block_size, mask=at < end, other=0)
    for tile in tl.range(begin, end, TILE, num_stages=STAGES):
        at = tile + column
        is_column = (at >= lowest) & (at < end)
        page = pages.to(tl.int64)
        later = at + TILE
        pages = tl.load(table_ptr + later // block_size, mask=later < end, other=0)
        slot = at % block_size
        k_rows = page * k_block + slot * k_slot
        v_rows = page * v_block + slot * v_slot
        k = tl.load(k_ptr + k_rows[None, :] + key_d[:, None], mask=is_column[None, :] & is_key[:, None], other=0.0)
        scores = tl.dot(q, k.to(q.dtype), input_precision="ieee") * scale
        if HAS_SCALES:
            scale_rows = page * scale_block + slot
            scores = scores * tl.load(k_scale_ptr + scale_rows, mask=is_column, other=0.0)[None, :]
        if HAS_SOFTCAP:
            # The tangent from an exponential that saturates instead of dividing infinities.
            scores = softcap * (1.0 - 2.0 / (tl.exp2(scores * (2.0 * LOG2_E) / softcap) + 1.0))
        if HAS_SLOPES:
            scores = scores + slope[:, None] * (at[None, :] - position[:, None]).to(tl.float32)
        sees = is_column[None, :]
        if CAUSAL:
            sees = sees & (at[None, :] <= position[:, None]) & (at[None, :] > position[:, None] - window)
        scores = tl.where(sees, scores * LOG2_E, float("-inf"))
        new = tl.maximum(maximum, tl.max(scores, 1))
        shift = new
        if CAUSAL:
            shift = tl.where(new == float("-inf"), 0.0, new)
        weights = tl.exp2(scores - shift[:, None])
        correction = tl.exp2(maximum - shift)
        total = total * correction + tl.sum(weights, 1)
        v = tl.load(v_ptr + v_rows[:, None] + value_d[None, :], mask=is_column[:, None] & is_value[None, :], other=0.0)
        if HAS_SCALES:
            weights = weights * tl.load(v_scale_ptr + scale_rows, mask=is_column, other=0.0)[None, :]
        sums = sums * correction[:, None] + tl.dot(weights.to(q.dtype), v.to(q.dtype), input_precision="ieee")
        maximum = new
    return maximum, total, sums
