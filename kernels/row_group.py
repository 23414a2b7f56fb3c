"""One padded product: the cached rows that a group of sequences gathers, and what each of its queries may see of them.

Before: `sequence_groups` chose the members. After: `reference` gathers the rows and multiplies, once per layer.
Always: a row that no query of its sequence sees is never gathered: a padded column reads the row of the last position
instead, which is visible and so holds a real value, and is then masked. Memory of a tile is bounded.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from .causal_band import CausalBand
from .row_view import RowSteps
from .sequence_groups import Member

# Elements that a group of several sequences may gather. Of 32 decodes x 640 positions, in groups of 1, 2 and 4 million, 2
# was quickest (5.8, 5.1 and 6.0 ms, one thread): large ones fall out of the CPU's cache between the gather and the product.
GATHER_ELEMENTS = 2 << 20
# Elements of the scores, or of the mask where the scores are never written out, of one tile.
SCORE_ELEMENTS = 8 << 20
# Queries of one tile: enough for a full-speed product, few enough that the columns behind the diagonal are skipped.
TILE_QUERIES = 256


class Geometry(NamedTuple):
    """What layers must have in common to share the gathered rows' numbers and the masks."""

    query_heads: int
    kv_heads: int
    key_width: int
    value_width: int
    key_steps: RowSteps
    value_steps: RowSteps
    window: int  # 0: none
    fused: bool  # the scores of chunks are never written out
    has_distances: bool  # scores depend on how far a position lies
    in_place: bool  # single queries weigh the values where they lie, without gathering them
    dtype: torch.dtype

    @property
    def max_rows(self) -> int:
        """Padded positions that a group of several sequences may hold."""
        width = self.key_width if self.in_place else self.key_width + self.value_width
        return max(1, GATHER_ELEMENTS // max(1, self.kv_heads * width))

    def tile_queries(self, rows: int, longest: int) -> int:
        """Queries of a tile over `rows` padded rows, for sequences with up to `longest` queries."""
        written = rows if self.fused else rows * self.query_heads
        return max(1, min(longest, TILE_QUERIES, SCORE_ELEMENTS // max(1, written)))


@dataclass(frozen=True, slots=True, eq=False)
class QueryTile:
    """`length` queries of each of n sequences, and the columns that any of them sees."""

    queries: Tensor | slice  # rows of q, [n * length]; a sequence with fewer repeats its last one
    kept: Tensor | None  # which of the n * length results are real; None: all
    kept_queries: Tensor | slice  # the rows of q that these answer
    length: int
    first_column: int
    end_column: int
    mask: Tensor | None  # [n, 1, length, columns], 0 or -inf; None: all of them see all columns
    distances: Tensor | None  # [n, 1, length, columns] position of a column less that of a query; None: nobody asks


@dataclass(frozen=True, slots=True, eq=False)
class RowGroup:
    """n sequences that gather `reach` positions each, for all their queries."""

    count: int  # n
    reach: int
    key_rows: Tensor  # [n * Hkv * reach] int64, rows of the K cache's row view
    value_rows: Tensor  # the same for V; with values in place for every query head, [n * Hq, reach]
    tiles: tuple[QueryTile, ...]
    in_place: bool  # the values are weighed where they lie


def build_band(groups: list[list[Member]], geometry: Geometry, device: torch.device) -> CausalBand | None:
    """The mask of all chunks that are groups of their own; None if there is none."""
    chunks = [group[0] for group in groups if len(group) == 1 and group[0].query_len > 1]
    if not chunks:
        return None
    queries = max(geometry.tile_queries(chunk.reach, chunk.query_len) for chunk in chunks)
    reach = max(chunk.reach for chunk in chunks)
    return CausalBand.build(queries, reach, geometry.window, geometry.dtype, device)


def build_group(
    members: list[Member], block_tables: Tensor, block_size: int, geometry: Geometry, band: CausalBand | None
) -> RowGroup:
    """The rows and tiles of one group. `block_tables` is the whole batch's [S, max_blocks]."""
    device = block_tables.device
    reach = max(member.reach for member in members)
    first, last = _columns_of(device, [m.first for m in members], [m.seq_len - 1 for m in members])
    columns = first + torch.arange(reach, device=device)  # [n, reach] positions; those past the end are padding
    gathered = torch.minimum(columns, last)
    tables = block_tables[torch.tensor([m.row for m in members], device=device)]
    blocks = tables.gather(1, gathered // block_size).long()
    offsets = gathered % block_size
    key_rows = _row_numbers(blocks, offsets, geometry.kv_heads, geometry.key_steps)
    value_rows = key_rows
    if geometry.value_steps != geometry.key_steps:
        value_rows = _row_numbers(blocks, offsets, geometry.kv_heads, geometry.value_steps)
    longest = max(member.query_len for member in members)
    in_place = geometry.in_place and longest == 1
    if in_place:
        grouped = geometry.query_heads // geometry.kv_heads
        value_rows = value_rows.view(-1, reach).repeat_interleave(grouped, dim=0)
    length = geometry.tile_queries(len(members) * reach, longest)
    ranges = [(start, min(start + length, longest)) for start in range(0, longest, length)]
    tiles = tuple(_build_tile(members, columns, start, end, geometry, band) for start, end in ranges)
    return RowGroup(len(members), reach, key_rows, value_rows, tiles, in_place)


def _row_numbers(blocks: Tensor, offsets: Tensor, kv_heads: int, steps: RowSteps) -> Tensor:
    """[n * Hkv * reach] rows of the row view, head by head, for blocks and offsets [n, reach]."""
    rows = blocks * steps.block + offsets * steps.offset
    heads = torch.arange(kv_heads, device=blocks.device) * steps.head
    return (rows.unsqueeze(1) + heads.unsqueeze(1)).flatten()


def _build_tile(
    members: list[Member], columns: Tensor, start: int, end: int, geometry: Geometry, band: CausalBand | None
) -> QueryTile:
    """Queries [start, end) of every member; `columns` [n, reach] are the positions that the group gathers."""
    low, high = _visible_columns(members, start, end, geometry.window)
    if len(members) == 1 and band is not None and members[0].query_len > 1:
        (member,) = members
        rows = slice(member.query_start + start, member.query_start + end)
        view = band.tile(member.query_column + start, end - start, low, high)
        at = torch.arange(member.query_column + start, member.query_column + end, device=columns.device)
        distances = _distances_of(torch.arange(low, high, device=columns.device)[None], at[None], geometry)
        return QueryTile(rows, None, rows, end - start, low, high, view, distances)
    begin, final, position = _columns_of(
        columns.device,
        [m.query_start for m in members],
        [m.query_len - 1 for m in members],
        [m.seq_len - m.query_len for m in members],
    )
    step = torch.arange(start, end, device=columns.device)
    own_step = torch.minimum(step, final)  # [n, length]
    queries, kept = (begin + own_step).flatten(), None
    if any(member.query_len < end for member in members):
        kept = (step <= final).flatten().nonzero().flatten()
    kept_queries = queries if kept is None else queries[kept]
    mask = _mask_of(columns[:, low:high], position + own_step, geometry)
    distances = _distances_of(columns[:, low:high], position + own_step, geometry)
    return QueryTile(_as_slice(queries), kept, _as_slice(kept_queries), end - start, low, high, mask, distances)


def _distances_of(columns: Tensor, positions: Tensor, geometry: Geometry) -> Tensor | None:
    """[n, 1, length, columns] for queries at `positions` [n, length] and `columns` [n, columns], if they are asked for."""
    return (columns.unsqueeze(1) - positions.unsqueeze(2)).unsqueeze(1) if geometry.has_distances else None


def _mask_of(columns: Tensor, positions: Tensor, geometry: Geometry) -> Tensor | None:
    """[n, 1, length, columns] for queries at `positions` [n, length]; None if they see all of `columns` [n, columns]."""
    seen, at = columns.unsqueeze(1), positions.unsqueeze(2)
    hidden = seen > at
    if geometry.window:
        hidden |= seen <= at - geometry.window
    if not hidden.any():
        return None
    mask = torch.zeros(hidden.shape, dtype=geometry.dtype, device=hidden.device)
    return mask.masked_fill_(hidden, float("-inf")).unsqueeze(1)


def _visible_columns(members: list[Member], start: int, end: int, window: int) -> tuple[int, int]:
    """Columns [low, high) that hold every position seen by any of the queries [start, end) of any member."""
    low, high = max(member.reach for member in members), 1
    for member in members:
        earliest = member.query_column + min(start, member.query_len - 1)
        low = min(low, max(0, earliest - window + 1) if window else 0)
        high = max(high, member.query_column + min(end, member.query_len))
    return low, high


def _as_slice(rows: Tensor) -> Tensor | slice:
    """`rows` as a slice where they follow each other, so that q is viewed and not copied."""
    first = int(rows[0])
    following = torch.arange(first, first + rows.numel(), device=rows.device)
    return slice(first, first + rows.numel()) if torch.equal(rows, following) else rows


def _columns_of(device: torch.device, *lists: list[int]) -> tuple[Tensor, ...]:
    """Each list of n numbers as a tensor [n, 1] int64."""
    return tuple(torch.tensor(numbers, dtype=torch.int64, device=device).unsqueeze(1) for numbers in lists)
