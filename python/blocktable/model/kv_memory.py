"""The KV memory: every block's keys and values of every layer, in one allocation.

Before: `kv_sizing` said how many blocks. After: `runner` hands each layer its two views; kernels write and read them. Always:
row b of the allocation is block b, of whichever group holds it; in it, for each layer of that group in order, K [kv_heads,
block_size, key_dim] and then V [kv_heads, block_size, value_dim], without gaps. The views of a group's layers never overlap,
and cover the allocation but for padding; those of other groups lie over them, on blocks that are never theirs at once.
"""

from __future__ import annotations

import math
import mmap
import sys

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..errors import InvalidInputError
from .geometry import KVGeometry
from .kv_sizing import KVSizing

HUGE_PAGE_BYTES = 2 * 2**20
"""Below this, huge pages cannot help."""


class KVMemory:
    """One allocation [num_blocks, elements_per_block] and each layer's strided views of it."""

    __slots__ = ("buffer", "device", "geometry", "layers", "sizing")

    def __init__(self, geometry: KVGeometry, sizing: KVSizing, device: torch.device) -> None:
        """Take the memory, zeroed. On a CPU its pages are taken as they are first written, not now.

        Raises `InvalidInputError` if the device has no room for it.
        """
        self.geometry = geometry
        self.sizing = sizing
        self.device = device
        self.buffer: Tensor = _take(geometry, sizing, device)
        """[num_blocks, elements_per_block], of the geometry's dtype."""
        self.layers: tuple[tuple[Tensor, Tensor], ...] = _layer_views(self.buffer, geometry, sizing.block_size)
        """For each layer k_cache [N, Hkv, B, Dk] and v_cache [N, Hkv, B, Dv]; a step in the first dimension is one block."""

    @property
    def block_size(self) -> int:
        """Tokens a block."""
        return self.sizing.block_size

    @property
    def num_blocks(self) -> int:
        """Blocks in all, the null block among them."""
        return self.sizing.num_blocks

    def copy_rows(self, copies: NDArray[np.int32]) -> None:
        """Copy the first rows of blocks to others: `copies` [C, 4] (group, source block, target block, rows), in order.

        Raises `InvalidInputError` for a block or a count out of range; nothing is copied then.
        """
        if not len(copies):
            return
        self._check_copies(copies)
        for group, source, target, rows in copies.tolist():
            if rows == self.block_size:
                self.buffer[target].copy_(self.buffer[source])
                continue
            for layer in self.geometry.groups[group].layers:
                for cache in self.layers[layer]:
                    cache[target, :, :rows].copy_(cache[source, :, :rows])

    def _check_copies(self, copies: NDArray[np.int32]) -> None:
        groups, blocks, rows = copies[:, 0], copies[:, 1:3], copies[:, 3]
        most = len(self.geometry.groups) - 1
        if groups.min() < 0 or groups.max() > most:
            raise InvalidInputError("copies", groups.tolist(), f"groups must be 0..{most}")
        if blocks.min() < 0 or blocks.max() >= self.num_blocks:
            raise InvalidInputError("copies", blocks.tolist(), f"blocks must be 0..{self.num_blocks - 1}")
        if rows.min() < 0 or rows.max() > self.block_size:
            raise InvalidInputError("copies", rows.tolist(), f"rows must be 0..{self.block_size}")


def _take(geometry: KVGeometry, sizing: KVSizing, device: torch.device) -> Tensor:
    shape = (sizing.num_blocks, geometry.elements_per_block(sizing.block_size))
    try:
        if device.type != "cpu":
            return torch.zeros(shape, dtype=geometry.dtype, device=device)
        return _take_lazily(math.prod(shape), geometry.dtype).view(shape)
    except (RuntimeError, OSError, MemoryError) as error:  # torch raises RuntimeError when memory is out
        raise InvalidInputError("num_blocks", sizing.num_blocks, f"{sizing.total_bytes} bytes cannot be had: {error}") from None


def _take_lazily(elements: int, dtype: torch.dtype) -> Tensor:
    """Zeros [elements] whose pages the system hands out when they are first written.

    `torch.zeros` writes every page: 0.6 to 6 s a GiB on a small virtual machine, against 0.2 ms for any size here.
    """
    size = elements * dtype.itemsize
    if sys.platform == "linux":
        # Private, since shared memory gets huge pages only where the system is set to give them.
        pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        # Rows of one head lie far apart: fewer, larger pages save misses in the translation of addresses.
        if size >= HUGE_PAGE_BYTES:
            pages.madvise(mmap.MADV_HUGEPAGE)
    else:
        pages = mmap.mmap(-1, size)
    return torch.frombuffer(pages, dtype=dtype, count=elements)


def _layer_views(buffer: Tensor, geometry: KVGeometry, block_size: int) -> tuple[tuple[Tensor, Tensor], ...]:
    views: dict[int, tuple[Tensor, Tensor]] = {}
    for group in geometry.groups:
        start = 0
        for number in group.layers:
            layer = geometry.layers[number]
            pair: list[Tensor] = []
            for width in (layer.key_dim, layer.value_dim):
                size = layer.kv_heads * block_size * width
                shape = (len(buffer), layer.kv_heads, block_size, width)
                strides = (buffer.stride(0), block_size * width, width, 1)
                pair.append(buffer.as_strided(shape, strides, storage_offset=start))
                start += size
            views[number] = (pair[0], pair[1])
    return tuple(views[number] for number in range(len(geometry.layers)))
