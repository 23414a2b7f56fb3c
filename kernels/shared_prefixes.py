"""Which sequences of a batch begin with the same blocks, so that attention reads these once for all of them.

Before: a plan's groups. After: `cascade` or `triton_cascade` attends each group's prefix, and each sequence's rest. Always:
what `build` has passed names a sequence once at most, and blocks that are the same in the tables of all members and end before
each one's query.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import torch
from torch import Tensor

from .sent import sent
from .shapes import KernelInputError


@dataclass(frozen=True, slots=True, eq=False)
class SharedPrefixes:
    """P groups with M members in all. Make it with `AttentionBatch.with_prefixes`."""

    members: tuple[int, ...]  # [M] sequences, group by group
    starts: tuple[int, ...]  # [P + 1] where each group's members begin
    positions: tuple[int, ...]  # [P] that a group shares
    num_seqs: int
    _tiles: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict, repr=False)
    _begins: list[Tensor] = field(default_factory=list, repr=False)

    @classmethod
    def build(
        cls,
        members: Sequence[int],
        starts: Sequence[int],
        blocks: Sequence[int],
        block_tables: Tensor,
        seq_lens: Sequence[int],
        block_size: int,
    ) -> SharedPrefixes:
        """Check groups as `_core.Plan.prefix_groups` has them. Raises `KernelInputError`."""
        members, starts, blocks = tuple(members), tuple(starts), tuple(blocks)
        if len(starts) != len(blocks) + 1 or starts[0] != 0 or starts[-1] != len(members):
            wanted = f"must be {len(blocks) + 1} numbers from 0 to {len(members)}, the members"
            raise KernelInputError(f"starts={list(starts)}: {wanted}")
        if len(set(members)) < len(members) or not all(0 <= member < len(seq_lens) for member in members):
            raise KernelInputError(f"members={list(members)}: must be sequences below {len(seq_lens)}, each at most once")
        for group, (begin, end) in enumerate(pairwise(starts)):
            if end <= begin:
                raise KernelInputError(f"starts[{group + 1}]={end}: must be above {begin}")
            own, count = members[begin:end], blocks[group]
            shortest = min(seq_lens[member] for member in own)
            if not 1 <= count * block_size < shortest:
                bound = (shortest - 1) // block_size
                raise KernelInputError(f"blocks[{group}]={count}: must be 1 to {bound}, those before each member's query")
            tables = block_tables[torch.tensor(own, device=block_tables.device), :count]
            if not torch.equal(tables, tables[:1].expand_as(tables)):
                raise KernelInputError(f"blocks[{group}]={count}: must be the same blocks in the tables of {list(own)}")
        positions = tuple(count * block_size for count in blocks)
        return cls(members, starts, positions, len(seq_lens))

    @property
    def saved_positions(self) -> int:
        """How many positions less are read."""
        return sum((end - start - 1) * count for (start, end), count in zip(pairwise(self.starts), self.positions, strict=True))

    def begins(self) -> list[int]:
        """[S] where each sequence's own rest begins; 0 without a group."""
        begins = [0] * self.num_seqs
        for (start, end), count in zip(pairwise(self.starts), self.positions, strict=True):
            for member in self.members[start:end]:
                begins[member] = count
        return begins

    def begin_tensor(self, device: torch.device) -> Tensor:
        """`begins` [S] int32. Made when the first layer asks."""
        if not self._begins:
            self._begins.append(sent(self.begins(), device))
        return self._begins[0]

    def tiles(self, most: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """members [M] and tiles [N, 3] (first of `members`, how many, positions) of up to `most` members: int32.

        Made when the first layer asks.
        """
        found = self._tiles.get(most)
        if found is None:
            tiles = [
                (first, min(most, end - first), count)
                for (start, end), count in zip(pairwise(self.starts), self.positions, strict=True)
                for first in range(start, end, most)
            ]
            found = self._tiles[most] = (sent(self.members, device), sent(tiles, device).view(-1, 3))
        return found
