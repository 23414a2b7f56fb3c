"""The bytes in which a map of the pool travels to whoever looks at it.

Before: `Scheduler.block_map`. After: the dashboard's page (`dashboard/block_map.js` reads the same) and `blocktable top`. Needs
nothing but the standard library.

    uint32 blocks, uint32 bytes of names (little-endian) | names of the tenants, JSON | a use for each block | a tenant for each
"""

from __future__ import annotations

import json
from typing import NamedTuple

USES = ("null", "free", "cached", "held", "shared", "pinned", "parked")
"""By the core's numbers: `cached` is free as well, but found by its content."""

SEVERAL = 255
"""A block of several tenants; 0 is nobody's, n is the n-th name."""


class BlockMap(NamedTuple):
    """What every block is doing: see `Scheduler.block_map`."""

    uses: bytes
    tenants: bytes
    names: list[str]


def pack(block_map: BlockMap) -> bytes:
    """The bytes of a map."""
    names = json.dumps(block_map.names).encode()
    counts = len(block_map.uses).to_bytes(4, "little") + len(names).to_bytes(4, "little")
    return b"".join((counts, names, block_map.uses, block_map.tenants))


def unpack(packed: bytes) -> BlockMap:
    """The map of these bytes. Raises `ValueError` if they are none."""
    num_blocks, length = int.from_bytes(packed[:4], "little"), int.from_bytes(packed[4:8], "little")
    start = 8 + length
    if len(packed) != start + 2 * num_blocks:
        raise ValueError(f"{len(packed)} bytes are no map of {num_blocks} blocks")
    names = json.loads(packed[8:start])
    return BlockMap(packed[start : start + num_blocks], packed[start + num_blocks :], names)
