"""Paged attention in plain torch: the path of CPUs, and the slow twin of every faster kernel.

Before: a layer's new queries, keys and values, its strided cache views and the step's `AttentionBatch`. After: the layer's
output projection. Always: only the slots of the write set change; a cached row that a query does not see never matters,
whatever it holds; scores are summed in float32 (in float64 for float64 inputs).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import embedding_bag, scaled_dot_product_attention

from .attention_batch import AttentionBatch
from .input_checks import check_attention, check_same_dtype, check_store
from .row_group import Geometry, QueryTile, RowGroup
from .row_view import row_view
from .scratch import Scratch

_SUMMED_IN_FLOAT32 = (torch.float16, torch.bfloat16)
# Up to so many query heads a KV head it is quicker to read the values of each head where they lie than to gather them for
# a product: 0.42 ms to 0.73 ms with 3 (32 sequences x 160 positions x 3 KV heads of 64, one thread), even at 8.
_IN_PLACE_GROUPED = 4


class _Scoring(NamedTuple):
    """How a score becomes a weight; see `paged_attention`."""

    scale: float
    softcap: float
    sinks: Tensor | None
    slopes: Tensor | None

    @property
    def is_plain(self) -> bool:
        """Nothing but the scale, so that torch's fused attention applies."""
        return not self.softcap and self.sinks is None and self.slopes is None


@torch.no_grad()
def store_kv(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor) -> None:
    """Put this step's keys and values where `slots` says; a negative slot is skipped.

    k [T, Hkv, Dk] · v [T, Hkv, Dv] · k_cache [N, Hkv, B, Dk] · v_cache [N, Hkv, B, Dv], any strides, one dtype ·
    slots [T] int64, block * B + offset, each at most once. Raises `ShapeError` and `KernelInputError` before anything
    is written.
    """
    sizes = check_store(k, v, k_cache, v_cache, slots)
    check_same_dtype(k=k, v=v, k_cache=k_cache, v_cache=v_cache)
    if not sizes["T"]:
        return
    block_size = sizes["B"]
    if int(slots.min()) < 0:
        written = (slots >= 0).nonzero().flatten()
        k, v, slots = k[written], v[written], slots[written]
    blocks, offsets = slots // block_size, slots % block_size
    k_cache[blocks, :, offsets] = k
    v_cache[blocks, :, offsets] = v


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
    slopes: Tensor | None = None,
) -> Tensor:
    """Causal attention of q [T, Hq, Dk] over the cached rows that `batch` names; returns [T, Hq, Dv].

    k_cache [N, Hkv, B, Dk] · v_cache [N, Hkv, B, Dv], any strides with D contiguous, of q's dtype; Hq is a multiple of
    Hkv, and query head h reads KV head h // (Hq / Hkv). A query at position p sees the positions j <= p, with a `window`
    above 0 only those j > p - window. Scores are scale * q.k, then softcap * tanh(score / softcap) for a `softcap` above
    0, then with `slopes` [Hq] slope * (j - p) more (ALiBi). `sinks` [Hq] add one logit a head to the softmax, which takes
    weight and gives nothing (as in gpt_oss).
    Raises `ShapeError` and `KernelInputError`.
    """
    options: dict[str, Any] = {"scale": scale, "window": window, "softcap": softcap, "sinks": sinks, "slopes": slopes}
    sizes = check_attention(q, k_cache, v_cache, batch, **options)
    if not sizes["T"]:
        return q.new_empty(0, sizes["Hq"], sizes["Dv"])
    keys, key_steps = row_view("k_cache", k_cache)
    values, value_steps = row_view("v_cache", v_cache)
    scoring = _Scoring(scale, softcap, sinks, slopes)
    geometry = Geometry(
        sizes["Hq"],
        sizes["Hkv"],
        sizes["Dk"],
        sizes["Dv"],
        key_steps,
        value_steps,
        window,
        fused=scoring.is_plain,
        has_distances=slopes is not None,
        in_place=_weighs_in_place(values, sizes["Hq"] // sizes["Hkv"]),
        dtype=q.dtype,
    )
    out = _attend(q, keys, values, batch, geometry, scoring)
    if batch.has_chunks and not math.isfinite(out.sum()):
        rows = _spoiled_rows(q, out)
        if rows.numel():
            out[rows] = _attend(q[rows], keys, values, batch.single_queries(rows.tolist()), geometry, scoring)
    return out


def _weighs_in_place(values: Tensor, grouped: int) -> bool:
    """torch's weighted sum of rows can read `values` as they are, and is quicker than gathering them for a product."""
    return (
        values.dtype == torch.float32
        and values.device.type == "cpu"
        and values.is_contiguous()
        and grouped <= _IN_PLACE_GROUPED
    )


def _attend(q: Tensor, keys: Tensor, values: Tensor, batch: AttentionBatch, geometry: Geometry, scoring: _Scoring) -> Tensor:
    """q [T, Hq, Dk] over the row views keys [rows, Dk] and values [rows, Dv] -> [T, Hq, Dv]."""
    out = q.new_empty(0)
    for rows, answers in _answers(q, keys, values, batch, geometry, scoring):
        if isinstance(rows, slice) and answers.shape[0] == q.shape[0]:
            return answers  # one product answered all: its memory is the result's
        if not out.numel():
            out = q.new_empty(q.shape[0], q.shape[1], values.shape[1])
        out[rows] = answers
    return out


def _answers(
    q: Tensor, keys: Tensor, values: Tensor, batch: AttentionBatch, geometry: Geometry, scoring: _Scoring
) -> Iterator[tuple[Tensor | slice, Tensor]]:
    """Rows of q and their answers [rows, Hq, Dv], product by product, until every row had its turn."""
    for group in batch.groups(geometry):
        shape = (group.count, geometry.kv_heads, group.reach)
        k = _gather("keys", keys, group.key_rows, batch.scratch).view(*shape, -1)
        if group.in_place:
            (tile,) = group.tiles
            yield tile.queries, _attend_in_place(q[tile.queries], k, values, group, scoring)
            continue
        v = _gather("values", values, group.value_rows, batch.scratch).view(*shape, -1)
        for tile in group.tiles:
            answers = _attend_tile(q, k, v, tile, scoring)
            yield tile.kept_queries, answers if tile.kept is None else answers[tile.kept]


def _gather(name: str, rows: Tensor, numbers: Tensor, scratch: Scratch) -> Tensor:
    buffer = scratch.take(name, numbers.numel(), rows.shape[1], rows)
    return torch.index_select(rows, 0, numbers, out=buffer)


def _attend_in_place(q: Tensor, k: Tensor, values: Tensor, group: RowGroup, scoring: _Scoring) -> Tensor:
    """Single queries q [n, Hq, Dk] over gathered k [n, Hkv, reach, Dk] and the row view `values` -> [n, Hq, Dv]."""
    weights = _weights(q.unsqueeze(1), k, group.tiles[0], scoring)
    summed = embedding_bag(group.value_rows, values, mode="sum", per_sample_weights=weights.reshape(group.value_rows.shape))
    return summed.view(q.shape[0], q.shape[1], -1)


def _attend_tile(q: Tensor, k: Tensor, v: Tensor, tile: QueryTile, scoring: _Scoring) -> Tensor:
    """The queries of one tile over the gathered k, v [n, Hkv, reach, D] -> [n * length, Hq, Dv]."""
    tile_q = q[tile.queries].view(k.shape[0], tile.length, *q.shape[1:])
    if tile.end_column - tile.first_column < k.shape[2]:
        k, v = (rows[:, :, tile.first_column : tile.end_column] for rows in (k, v))
    # Two plain products beat the fused one for single queries: 0.42 ms to 0.75 ms for 32 sequences x 160 positions.
    attend = _attend_fused if scoring.is_plain and tile.length > 1 else _attend_by_products
    return attend(tile_q, k, v, tile, scoring).reshape(-1, q.shape[1], v.shape[3])


def _attend_fused(q: Tensor, k: Tensor, v: Tensor, tile: QueryTile, scoring: _Scoring) -> Tensor:
    """q [n, length, Hq, Dk] · k, v [n, Hkv, columns, D] -> [n, length, Hq, Dv], without writing the scores out."""
    grouped = q.shape[2] != k.shape[1]
    out = scaled_dot_product_attention(q.transpose(1, 2), k, v, attn_mask=tile.mask, scale=scoring.scale, enable_gqa=grouped)
    return out.transpose(1, 2)


def _attend_by_products(q: Tensor, k: Tensor, v: Tensor, tile: QueryTile, scoring: _Scoring) -> Tensor:
    """The same as `_attend_fused` by two products, with soft cap, slopes and sinks -> [n, length, Hkv, G, Dv]."""
    count, length, query_heads, _ = q.shape
    weights = _weights(q, k, tile, scoring)
    summed = torch.bmm(weights, v.flatten(0, 1).to(weights.dtype))
    by_head = summed.view(count, k.shape[1], query_heads // k.shape[1], length, -1)
    return by_head.permute(0, 3, 1, 2, 4).to(q.dtype)


def _weights(q: Tensor, k: Tensor, tile: QueryTile, scoring: _Scoring) -> Tensor:
    """Softmax over the columns, for q [n, length, Hq, Dk] and k [n, Hkv, columns, Dk]: [n * Hkv, G * length, columns].

    The queries of all G heads that share a KV head are rows of one product, so K and V are never repeated.
    """
    count, length, query_heads, width = q.shape
    kv_heads, columns = k.shape[1], k.shape[2]
    grouped = query_heads // kv_heads
    rows = q if length == 1 else q.view(count, length, kv_heads, grouped, width).permute(0, 2, 3, 1, 4)
    rows, k = rows.reshape(count * kv_heads, grouped * length, width), k.flatten(0, 1)
    if q.dtype in _SUMMED_IN_FLOAT32:
        rows, k = rows.float(), k.float()
    scores = torch.baddbmm(rows.new_empty(1, 1, 1), rows, k.transpose(1, 2), beta=0, alpha=scoring.scale)
    if scoring.softcap:
        scores = (scores / scoring.softcap).tanh_() * scoring.softcap
    by_query = scores.view(count, kv_heads, grouped, length, columns)
    if scoring.slopes is not None and tile.distances is not None:
        by_query.add_(scoring.slopes.to(scores.dtype).view(kv_heads, grouped, 1, 1) * tile.distances.unsqueeze(1))
    if tile.mask is not None:
        by_query.add_(tile.mask.unsqueeze(1))
    if scoring.sinks is None:
        return scores.softmax(-1)
    sinks = scoring.sinks.to(scores.dtype).view(1, kv_heads, grouped, 1, 1).expand(count, -1, -1, length, 1)
    return torch.cat((scores, sinks.reshape(*scores.shape[:2], 1)), -1).softmax(-1)[..., :-1]


def _spoiled_rows(q: Tensor, out: Tensor) -> Tensor:
    """Queries (rows of q, ascending) that came out as NaN without being so themselves; they must be attended alone.

    The queries of a chunk share their gathered rows, and a masked row still meets them with weight 0, and 0 * NaN is NaN.
    So one broken row would spoil the queries before it, whose rows in the next layers may be published and shared. A
    query that is NaN itself stays so, which bounds this to what a broken row first touches.
    """
    spoiled = out.isnan().flatten(1).any(1) & q.isfinite().flatten(1).all(1)
    return spoiled.nonzero().flatten()
