"""A paged cache seen as one list of rows, so that a single gather can fetch any of them.

Before: `reference.paged_attention` has the strided cache of one layer. After: it selects rows by number. Always: row
`block * steps.block + head * steps.head + offset * steps.offset` of the view is exactly cache[block, head, offset], and the
view ends with the cache's last row. All numbers are 64-bit.
"""

from __future__ import annotations

from math import gcd
from typing import NamedTuple

from torch import Tensor

from .shapes import KernelInputError


class RowSteps(NamedTuple):
    """How far apart, in rows of the view, neighbouring blocks, heads and offsets of a cache lie."""

    block: int
    head: int
    offset: int


def row_view(name: str, cache: Tensor) -> tuple[Tensor, RowSteps]:
    """All rows of `cache` [N, H, B, D] (any strides, D contiguous) as a view [rows, D], and the steps through it.

    The rows start at multiples of the greatest common divisor of the strides. Where that is smaller than D, rows of the
    view overlap: read it, never write to it.
    """
    blocks, heads, offsets, width = cache.shape
    if width > 1 and cache.stride(3) != 1:
        raise KernelInputError(f"{name} has stride {cache.stride(3)} in its last dimension: must be 1")
    # The stride of a dimension of size 1 is never used and may be anything.
    strides = [step if size > 1 else 0 for size, step in zip(cache.shape[:3], cache.stride()[:3], strict=True)]
    unit = gcd(*strides) or max(width, 1)
    last = (blocks - 1) * strides[0] + (heads - 1) * strides[1] + (offsets - 1) * strides[2]
    rows = cache.as_strided((last // unit + 1, width), (unit, 1), cache.storage_offset())
    return rows, RowSteps(strides[0] // unit, strides[1] // unit, strides[2] // unit)
