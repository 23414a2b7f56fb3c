"""The shape of a model's keys and values: how many bytes a token and a block take.

Before: `trace` saw every layer's keys and values. After: `layer_groups` puts the layers into groups, `kv_sizing` counts blocks
and `kv_memory` lays them out. Always: the layers are numbered in the order in which a forward pass calls them; they may differ
from each other, and each is in exactly one group.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..errors import UnsupportedModelError
from .trace import AttentionTrace


@dataclass(frozen=True, slots=True)
class LayerShape:
    """One layer's keys [kv_heads, key_dim] and values [kv_heads, value_dim] of one token, and the rows that a query sees."""

    kv_heads: int
    key_dim: int
    value_dim: int
    window: int | None = None
    """Its own row and those before it, so many in all; None: all."""

    @property
    def elements_per_token(self) -> int:
        """Numbers that a token takes in this layer."""
        return self.kv_heads * (self.key_dim + self.value_dim)


@dataclass(frozen=True, slots=True)
class LayerGroup:
    """Layers that share a block table, since their queries see the same rows."""

    window: int | None
    layers: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class KVGeometry:
    """All layers of a model that keep keys and values, in call order, and the one dtype they are kept in."""

    layers: tuple[LayerShape, ...]
    dtype: torch.dtype
    groups: tuple[LayerGroup, ...] = ()
    """Without any given: one group of all layers that keeps every row."""

    def __post_init__(self) -> None:
        if not self.groups:
            object.__setattr__(self, "groups", (LayerGroup(None, tuple(range(len(self.layers)))),))

    @property
    def bytes_per_token(self) -> int:
        """Bytes of one token's keys and values over all layers."""
        return self.dtype.itemsize * sum(layer.elements_per_token for layer in self.layers)

    def elements_per_block(self, block_size: int) -> int:
        """Numbers in one block of `block_size` tokens: as many as the largest group needs."""
        return block_size * max(self._elements(group) for group in self.groups)

    def bytes_per_block(self, block_size: int) -> int:
        """Bytes of one block of `block_size` tokens of one group."""
        return self.dtype.itemsize * self.elements_per_block(block_size)

    @property
    def padding(self) -> float:
        """Share of the bytes of a block of each group that holds nothing."""
        taken = len(self.groups) * self.elements_per_block(1)
        return 1 - sum(layer.elements_per_token for layer in self.layers) / taken

    def group_of(self, layer: int) -> int:
        """The group of a layer."""
        return next(number for number, group in enumerate(self.groups) if layer in group.layers)

    def _elements(self, group: LayerGroup) -> int:
        return sum(self.layers[layer].elements_per_token for layer in group.layers)


def read_geometry(trace: AttentionTrace, name: str) -> KVGeometry:
    """The geometry that a forward pass showed. Raises `UnsupportedModelError` if no layer attends, or their dtypes differ."""
    if not trace.calls:
        raise UnsupportedModelError(name, "no layer of it calls attention, so it keeps no keys and values to page")
    dtypes = sorted({str(call.dtype) for call in trace.calls})
    if len(dtypes) > 1:
        raise UnsupportedModelError(name, f"its layers hand over keys of different dtypes ({', '.join(dtypes)})")
    layers = tuple(LayerShape(call.kv_heads, call.key_dim, call.value_dim, call.window or None) for call in trace.calls)
    return KVGeometry(layers, trace.calls[0].dtype)
