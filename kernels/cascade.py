"""Decodes whose shared prefixes are attended once for a whole group, in plain torch: the twin of the Triton cascade.

Before: `store_kv` of the same step. After: the layer's output projection. Always: what `reference.paged_attention` promises,
for single queries without a window; a group's prefix and a sequence's rest are two softmaxes, joined by their maxima and sums.
"""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from .attention_batch import AttentionBatch
from .input_checks import check_attention, check_single_queries


class _Partial(NamedTuple):
    """A softmax over some positions: weighted values [n, Hq, Dv], sums of weights and the maxima [n, Hq] that these rest on."""

    sums: Tensor
    total: Tensor
    maximum: Tensor

    def joined(self, other: _Partial) -> _Partial:
        """Over the positions of both."""
        maximum = torch.maximum(self.maximum, other.maximum)
        mine, theirs = (self.maximum - maximum).exp(), (other.maximum - maximum).exp()
        sums = self.sums * mine.unsqueeze(-1) + other.sums * theirs.unsqueeze(-1)
        return _Partial(sums, self.total * mine + other.total * theirs, maximum)


@torch.no_grad()
def cascade_decode(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    batch: AttentionBatch,
    *,
    scale: float,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    slopes: Tensor | None = None,
) -> Tensor:
    """As `reference.paged_attention`, for a batch with `prefixes` whose sequences have at most one query each.

    Raises `ShapeError` and `KernelInputError`.
    """
    sizes = check_attention(q, k_cache, v_cache, batch, scale=scale, softcap=softcap, sinks=sinks, slopes=slopes)
    check_single_queries(batch)
    wide = torch.promote_types(q.dtype, torch.float32)
    out = q.new_empty(sizes["T"], sizes["Hq"], sizes["Dv"])
    rows = {sequence: row for sequence, (row, end) in enumerate(pairwise(batch.query_starts)) if end > row}
    begins = [0] * len(batch.seq_lens) if batch.prefixes is None else batch.prefixes.begins()

    def attend(sequences: list[int], first: int, end: int) -> _Partial:
        """The queries of `sequences` over positions [first, end) of the first one's table."""
        at = torch.arange(first, end, device=q.device)
        blocks = batch.block_tables[sequences[0]][at // batch.block_size].long()
        k, v = (cache[blocks, :, at % batch.block_size].to(wide) for cache in (k_cache, v_cache))  # [L, Hkv, D]
        queries = q[[rows[sequence] for sequence in sequences]].to(wide).view(len(sequences), sizes["Hkv"], -1, sizes["Dk"])
        scores = torch.einsum("nhgd,lhd->nhgl", queries, k).flatten(1, 2) * scale  # [n, Hq, L]
        if softcap:
            scores = softcap * (scores / softcap).tanh()
        if slopes is not None:
            position = torch.tensor([batch.seq_lens[sequence] - 1 for sequence in sequences], device=q.device)
            scores = scores + slopes.to(wide).view(1, -1, 1) * (at - position.unsqueeze(1)).unsqueeze(1)
        maximum = scores.amax(-1)
        weights = (scores - maximum.unsqueeze(-1)).exp()
        sums = torch.einsum("nhgl,lhd->nhgd", weights.view(*queries.shape[:3], -1), v).flatten(1, 2)
        return _Partial(sums, weights.sum(-1), maximum)

    prefixes: dict[int, _Partial] = {}
    if batch.prefixes is not None:
        for (start, end), count in zip(pairwise(batch.prefixes.starts), batch.prefixes.positions, strict=True):
            members = [member for member in batch.prefixes.members[start:end] if member in rows]
            if members:
                found = attend(members, 0, count)
                prefixes |= {member: _Partial(*(part[i : i + 1] for part in found)) for i, member in enumerate(members)}
    for sequence, row in rows.items():
        partial = attend([sequence], begins[sequence], batch.seq_lens[sequence])
        if sequence in prefixes:
            partial = partial.joined(prefixes[sequence])
        total = partial.total if sinks is None else partial.total + (sinks.to(wide) - partial.maximum).exp()
        out[row] = (partial.sums / total.unsqueeze(-1))[0].to(q.dtype)
    return out
