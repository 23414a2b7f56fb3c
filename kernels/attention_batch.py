"""What one step attends to, checked and prepared once and read by every layer.

Before: the plan's block tables, query starts and lengths. After: `paged_attention` of each layer. Always: what passed
`build` names only blocks that its tables hold, so a kernel never reads an index that was not checked; layers of equal
geometry and window share one set of gather numbers, made when the first of them asks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

import torch
from torch import Tensor

from .context_parts import ContextParts, count_parts
from .row_group import Geometry, RowGroup, build_band, build_group
from .scratch import Scratch
from .sent import sent
from .sequence_groups import Member, group_members
from .shapes import KernelInputError, bind
from .shared_prefixes import SharedPrefixes

_INTEGERS = (torch.int32, torch.int64)


@dataclass(frozen=True, slots=True, eq=False)
class AttentionBatch:
    """S sequences with T queries in all; a sequence's queries are the last of its visible positions.

    Make it with `build`. It reads `block_tables` until it is dropped: the tables must not change before.
    """

    block_tables: Tensor  # [S, max_blocks] int32 or int64
    block_size: int
    query_starts: tuple[int, ...]  # [S + 1]
    seq_lens: tuple[int, ...]  # [S]
    end_block: int  # one more than the highest block id that is read
    has_chunks: bool  # some sequence has more than one query
    scratch: Scratch  # where the layers gather
    prefixes: SharedPrefixes | None = None  # what several sequences begin with, for cascades
    most_parts: int | None = None  # of all contexts together, where their lengths are not known here
    _groups: dict[Geometry, tuple[RowGroup, ...]] = field(default_factory=dict, repr=False)
    _integers: list[Tensor] = field(default_factory=list, repr=False)
    _parts: dict[int | None, ContextParts] = field(default_factory=dict, repr=False)  # by window; None: behind prefixes

    @classmethod
    def build(
        cls,
        block_tables: Tensor,
        query_starts: Tensor,
        seq_lens: Tensor,
        block_size: int,
        scratch: Scratch | None = None,
    ) -> AttentionBatch:
        """Check a step's arrays and keep them.

        block_tables [S, max_blocks] · query_starts [S + 1] · seq_lens [S], int32 or int64. Sequence i has the queries
        [query_starts[i], query_starts[i + 1]), none allowed, and sees seq_lens[i] positions with its last one. Columns
        past a sequence's last block may hold anything. Hand in the same `scratch` step after step to spare its memory's
        first touch. Raises `ShapeError` and `KernelInputError`.
        """
        bind("S max_blocks", block_tables=block_tables).bind("S+1", query_starts=query_starts).bind("S", seq_lens=seq_lens)
        for name, tensor in (("block_tables", block_tables), ("query_starts", query_starts), ("seq_lens", seq_lens)):
            if tensor.dtype not in _INTEGERS:
                raise KernelInputError(f"{name} has dtype {tensor.dtype}: must be torch.int32 or torch.int64")
        if block_size < 1:
            raise KernelInputError(f"block_size={block_size}: must be at least 1")
        starts, lens = tuple(query_starts.tolist()), tuple(seq_lens.tolist())
        _check_lengths(starts, lens, block_tables.shape[1] * block_size)
        end_block = _end_block(block_tables, seq_lens, block_size)
        has_chunks = any(end - start > 1 for start, end in pairwise(starts))
        return cls(block_tables, block_size, starts, lens, end_block, has_chunks, scratch or Scratch())

    @classmethod
    def unread(
        cls,
        block_tables: Tensor,
        query_starts: Tensor,
        seq_lens: Tensor,
        block_size: int,
        *,
        end_block: int,
        most_parts: int | None = None,
    ) -> AttentionBatch:
        """Single queries over int32 tensors on a device that change from launch to launch, and are never read here.

        What kernels ask on the host is the most that may be: each of the S sequences has one query and sees all of its columns,
        of blocks below `end_block`, in `most_parts` parts of contexts altogether (None: as many as the columns hold). For the
        Triton kernels, which read lengths on the device. Raises `ShapeError` and `KernelInputError`.
        """
        sizes = (
            bind("S max_blocks", block_tables=block_tables).bind("S+1", query_starts=query_starts).bind("S", seq_lens=seq_lens)
        )
        tensors = {"block_tables": block_tables, "query_starts": query_starts, "seq_lens": seq_lens}
        for name, tensor in tensors.items():
            if tensor.dtype != torch.int32 or (tensor.numel() > 1 and tensor.stride(-1) != 1):
                raise KernelInputError(f"{name} has dtype {tensor.dtype}: must be torch.int32, without gaps")
        most = sizes["max_blocks"] * block_size
        starts, lens = tuple(range(sizes["S"] + 1)), (most,) * sizes["S"]
        parts = sizes["S"] * max(1, count_parts(most))
        if most_parts is not None:
            parts = min(parts, most_parts)
        batch = cls(block_tables, block_size, starts, lens, end_block, has_chunks=False, scratch=Scratch(), most_parts=parts)
        batch._integers.extend(tensors.values())
        return batch

    def with_prefixes(self, members: Sequence[int], starts: Sequence[int], blocks: Sequence[int]) -> AttentionBatch:
        """The same with groups of sequences that share their first blocks, as `_core.Plan.prefix_groups` has them.

        Sequences `members[starts[i]:starts[i + 1]]` share `blocks[i]` blocks, which end before each one's last position. Raises
        `KernelInputError`.
        """
        build = SharedPrefixes.build
        prefixes = build(members, starts, blocks, self.block_tables, self.seq_lens, self.block_size)
        return replace(self, prefixes=prefixes, _parts={})

    def on_device(self, block_tables: Tensor, query_starts: Tensor, seq_lens: Tensor) -> AttentionBatch:
        """The same, for kernels that read copies of its arrays on a device: int32, without gaps.

        A batch of tensors on a device can be built too, but its lengths and tables are then read back, which waits for it.
        """
        arrays = [block_tables, query_starts, seq_lens]
        return replace(self, block_tables=block_tables, _groups={}, _integers=arrays, _parts={})

    @property
    def num_tokens(self) -> int:
        """T, the rows of q."""
        return self.query_starts[-1]

    def integers(self) -> tuple[Tensor, Tensor, Tensor]:
        """block_tables [S, max_blocks], query_starts [S + 1] and seq_lens [S] as int32 without gaps, on the tables' device.

        Made when the first layer asks.
        """
        if not self._integers:
            device = self.block_tables.device
            self._integers.append(self.block_tables.to(torch.int32).contiguous())
            for numbers in (self.query_starts, self.seq_lens):
                self._integers.append(sent(numbers, device))
        tables, starts, lens = self._integers
        return tables, starts, lens

    def parts(self, window: int = 0) -> ContextParts:
        """What single queries see, in parts, whatever they share. Made when the first layer asks."""
        window = window if self.outgrows(window) else 0
        found = self._parts.get(window)
        if found is None:
            found = self._parts[window] = self._cut(window)
        return found

    def rests(self, prefixes: SharedPrefixes) -> ContextParts:
        """What single queries see behind `prefixes`, those of this batch, in parts. Made when the first layer asks."""
        found = self._parts.get(None)
        if found is None:
            begins = prefixes.begins()
            num_parts = sum(max(1, count_parts(end - begin)) for begin, end in zip(begins, self.seq_lens, strict=True))
            lens = self.integers()[2]
            own = prefixes.begin_tensor(lens.device)
            found = ContextParts.cut(lens, num_parts, begins=own, num_before=sum(map(count_parts, begins)))
            self._parts[None] = found
        return found

    def outgrows(self, window: int) -> bool:
        """Whether some sequence is longer than a window, which is none if it is 0."""
        return 0 < window < max(self.seq_lens, default=0)

    def groups(self, geometry: Geometry) -> tuple[RowGroup, ...]:
        """The products that attend every query once, for layers of this geometry."""
        if not self.outgrows(geometry.window):
            geometry = geometry._replace(window=0)  # nothing is out of its reach
        found = self._groups.get(geometry)
        if found is None:
            chosen = group_members(self._members(geometry.window), geometry.max_rows)
            band = build_band(chosen, geometry, self.block_tables.device)
            found = tuple(build_group(group, self.block_tables, self.block_size, geometry, band) for group in chosen)
            self._groups[geometry] = found
        return found

    def single_queries(self, rows: list[int]) -> AttentionBatch:
        """These queries (rows of q, ascending) as a batch of their own, each as the only one of its sequence."""
        lens, index, sequence = [], [], 0
        for row in rows:
            while self.query_starts[sequence + 1] <= row:
                sequence += 1
            index.append(sequence)
            lens.append(self.seq_lens[sequence] - (self.query_starts[sequence + 1] - row) + 1)
        tables = self.block_tables[torch.tensor(index, dtype=torch.int64, device=self.block_tables.device)]
        starts = tuple(range(len(rows) + 1))
        return replace(
            self,
            block_tables=tables,
            query_starts=starts,
            seq_lens=tuple(lens),
            has_chunks=False,
            prefixes=None,
            _groups={},
            _integers=[],
            _parts={},
        )

    def _cut(self, window: int) -> ContextParts:
        lens = self.integers()[2]
        if self.most_parts is not None:
            most = min(self.most_parts, len(lens) * count_parts(window)) if window else self.most_parts
            return ContextParts.cut(lens, most, window=window)
        seen = (min(seq_len, window) if window else seq_len for seq_len in self.seq_lens)
        return ContextParts.cut(lens, sum(max(1, count_parts(positions)) for positions in seen), window=window)

    def _members(self, window: int) -> list[Member]:
        """Every sequence that has queries."""
        members = []
        for row, ((start, end), seq_len) in enumerate(zip(pairwise(self.query_starts), self.seq_lens, strict=True)):
            first = max(0, seq_len - (end - start) + 1 - window) if window else 0
            if end > start:
                members.append(Member(row, start, end - start, seq_len, first))
        return members


def _check_lengths(starts: tuple[int, ...], lens: tuple[int, ...], most: int) -> None:
    if starts[0] != 0:
        raise KernelInputError(f"query_starts[0]={starts[0]}: must be 0")
    for index, seq_len in enumerate(lens):
        q_len = starts[index + 1] - starts[index]
        if q_len < 0:
            raise KernelInputError(f"query_starts[{index + 1}]={starts[index + 1]}: must be at least {starts[index]}")
        if not q_len <= seq_len <= most:
            raise KernelInputError(f"seq_lens[{index}]={seq_len}: must be {q_len} (its queries) to {most} (its table's rows)")


def _end_block(block_tables: Tensor, seq_lens: Tensor, block_size: int) -> int:
    """One more than the highest id in the columns that hold visible positions; none of these may be negative."""
    if not seq_lens.numel():
        return 0
    needed = (seq_lens.long() + (block_size - 1)) // block_size  # [S] blocks
    columns = torch.arange(int(needed.max()), device=block_tables.device)
    if not columns.numel():
        return 0
    ids = block_tables[:, : columns.numel()].masked_fill(columns >= needed.unsqueeze(1), 0)
    low, high = ids.aminmax()
    if int(low) < 0:
        row, column = (int(i) for i in (ids < 0).nonzero()[0])
        found, wanted = int(ids[row, column]), f"must be a block id, for seq_lens[{row}]={int(seq_lens[row])}"
        raise KernelInputError(f"block_tables[{row}, {column}]={found}: {wanted}")
    return int(high) + 1
