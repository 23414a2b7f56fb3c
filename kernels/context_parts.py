"""How the contexts of single queries are cut into parts, which run side by side and are joined.

Before: `attention_batch` knows how long each context is. After: `triton_decode` runs one program for each part and KV head.
Always: where a context is cut depends on its own length alone (and on what of it is attended elsewhere); the parts are listed
one after the other, so that programs and memory grow with the positions that are seen and not with the longest context; the
list is made without a look at what a device holds.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

PART = 512
"""Positions of a part."""


def count_parts(positions: int) -> int:
    """How many parts so many positions have."""
    return -(-positions // PART)


@dataclass(frozen=True, slots=True, eq=False)
class ContextParts:
    """W parts of S contexts, and M more that were attended before: a place in memory for each. Make it with `cut`."""

    sequences: Tensor  # [W] int32, whose part it is; S where there is none
    firsts: Tensor  # [S, 2] int32: of each context its first part in the list, and the place of its first one in memory
    num_places: int  # W + M

    @classmethod
    def cut(
        cls, lens: Tensor, num_parts: int, *, window: int = 0, begins: Tensor | None = None, num_before: int = 0
    ) -> ContextParts:
        """Contexts of `lens` [S] int32 positions, of which the last `window` are seen (0: all), or those from `begins` [S] on.

        A context of which nothing is seen has one part. There must not be more than `num_parts` in all, nor more than
        `num_before` parts before `begins`.
        """
        before = torch.zeros_like(lens) if begins is None else (begins + (PART - 1)) // PART
        seen = lens - begins if begins is not None else lens.clamp(max=window) if window else lens
        used = ((seen + (PART - 1)) // PART).clamp(min=1)
        ends = used.cumsum(0, dtype=torch.int32)
        parts = torch.arange(num_parts, dtype=torch.int32, device=lens.device)
        sequences = torch.searchsorted(ends, parts, right=True, out_int32=True)
        firsts = ends - used
        places = firsts + (before.cumsum(0, dtype=torch.int32) - before)
        return cls(sequences, torch.stack((firsts, places), 1), num_parts + num_before)
