"""Attention of one sequence written over positions, one head and one query at a time: the oracle of the tests.

Before: a sequence's keys and values as plain tensors. After: `tests/kernels` compares. Always: knows nothing of blocks,
slots, batches or padding, and computes in float64.
"""

from __future__ import annotations

import torch
from torch import Tensor


def dense_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    slopes: Tensor | None = None,
) -> Tensor:
    """q [T, Hq, Dk], the last T of L positions · k [L, Hkv, Dk] · v [L, Hkv, Dv] -> [T, Hq, Dv] float64.

    The options mean what they mean in `reference.paged_attention`.
    """
    num_queries, query_heads, _ = q.shape
    num_positions, kv_heads, _ = k.shape
    out = torch.zeros(num_queries, query_heads, v.shape[2], dtype=torch.float64)
    for head in range(query_heads):
        kv_head = head // (query_heads // kv_heads)
        for query in range(num_queries):
            position = num_positions - num_queries + query
            first = max(0, position - window + 1) if window > 0 else 0
            keys = k[first : position + 1, kv_head].double()
            values = v[first : position + 1, kv_head].double()
            scores = scale * (keys @ q[query, head].double())
            if softcap > 0:
                scores = softcap * torch.tanh(scores / softcap)
            if slopes is not None:
                scores = scores + slopes[head].double() * (torch.arange(first, position + 1) - position)
            if sinks is not None:
                scores = torch.cat([scores, sinks[head].double().reshape(1)])
            weights = torch.softmax(scores, dim=0)[: len(keys)]
            out[query, head] = weights @ values
    return out
