"""Splits a model's layers into the groups of the scheduler, so that memory behind a window is given back.

Before: `geometry` knows every layer's shape and window. After: `kv_memory` lays out a block for the largest group, the
scheduler has a table for each. Always: the layers of a group see the same rows, and all groups take the same bytes of a
block; what the smaller ones leave is padding, which is counted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate

from ..errors import UnsupportedModelError
from .geometry import KVGeometry, LayerGroup

MAX_GROUPS = 16
"""Groups that the scheduler takes."""
MOST_PADDING = 1 / 8
"""Share of a group's bytes that may be padding, if any split keeps to it: fewer groups are quicker, padding is lost memory."""


def group_layers(geometry: KVGeometry, max_model_len: int, name: str) -> KVGeometry:
    """`geometry` with its layers in groups by window; one that no sequence outgrows is none.

    Of all sizes of a group it takes the one with the fewest groups among those with little padding, else the least padding.
    Raises `UnsupportedModelError` if the layers have more kinds of windows than there may be groups.
    """
    kinds = _kinds(geometry, max_model_len)
    splits = [split for split in _splits(geometry, kinds) if len(split) <= MAX_GROUPS]
    if not splits:
        reason = f"its layers have {len(kinds)} kinds of windows; there may be {MAX_GROUPS} groups"
        raise UnsupportedModelError(name, reason)
    grouped = [replace(geometry, groups=split) for split in splits]
    spare = [candidate for candidate in grouped if candidate.padding <= MOST_PADDING]
    if spare:
        return min(spare, key=lambda candidate: (len(candidate.groups), candidate.padding))
    return min(grouped, key=lambda candidate: (candidate.padding, len(candidate.groups)))


def _kinds(geometry: KVGeometry, max_model_len: int) -> dict[int | None, list[int]]:
    """Layers by window, those that see everything first."""
    kinds: dict[int | None, list[int]] = {}
    for number, layer in enumerate(geometry.layers):
        window = layer.window if layer.window is not None and layer.window < max_model_len else None
        kinds.setdefault(window, []).append(number)
    return dict(sorted(kinds.items(), key=lambda kind: (kind[0] is not None, kind[0] or 0)))


def _splits(geometry: KVGeometry, kinds: dict[int | None, list[int]]) -> list[tuple[LayerGroup, ...]]:
    """For every size that some layers of one kind fill exactly: all layers in groups of at most that size."""
    sizes: set[int] = set()
    for layers in kinds.values():
        sizes.update(accumulate(geometry.layers[layer].elements_per_token for layer in layers))
    largest = max(layer.elements_per_token for layer in geometry.layers)
    return [
        tuple(LayerGroup(window, part) for window, layers in kinds.items() for part in _filled(geometry, layers, size))
        for size in sorted(sizes)
        if size >= largest
    ]


def _filled(geometry: KVGeometry, layers: Sequence[int], size: int) -> list[tuple[int, ...]]:
    """`layers` in order, in parts of at most `size` elements a token."""
    parts: list[list[int]] = []
    room = 0
    for layer in layers:
        needed = geometry.layers[layer].elements_per_token
        if needed > room:
            parts.append([])
            room = size
        parts[-1].append(layer)
        room -= needed
    return [tuple(part) for part in parts]
