"""One mask for every chunk that is attended alone: a causal band, of which each tile takes a view.

Before: `attention_batch` knows the longest reach of its chunks. After: `row_group` slices it. Always: what a query sees
depends on the distance alone, so no tile needs a mask of its own, and memory does not grow with queries x positions.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, eq=False)
class CausalBand:
    """`mask` [queries, reach + queries]: query i stands in column reach + i; 0 where it sees, -inf where not."""

    mask: Tensor
    reach: int

    @classmethod
    def build(cls, queries: int, reach: int, window: int, dtype: torch.dtype, device: torch.device) -> CausalBand:
        """For tiles of up to `queries` queries over up to `reach` columns, with the window of `paged_attention`."""
        column = torch.arange(reach + queries, device=device)
        stands = torch.arange(reach, reach + queries, device=device).unsqueeze(1)
        hidden = column > stands
        if window:
            hidden |= column <= stands - window
        return cls(torch.zeros(hidden.shape, dtype=dtype, device=device).masked_fill_(hidden, float("-inf")), reach)

    def tile(self, stands: int, queries: int, low: int, high: int) -> Tensor:
        """[1, 1, queries, high - low]: columns [low, high) for queries that stand in the columns from `stands` on."""
        shift = self.reach - stands
        return self.mask[:queries, low + shift : high + shift].view(1, 1, queries, high - low)
