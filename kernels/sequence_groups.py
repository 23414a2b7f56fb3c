"""Which sequences of a batch are attended together: those of similar shape, padded to the longest.

Before: `attention_batch` knows every sequence's queries and positions. After: `row_group` makes one padded product of each
group. Always: a group holds either single queries or chunks, never both; padding adds at most `WASTE` of the real work
and `FREE_PAIRS` more; a group of several sequences has at most the given number of rows, and all masks of groups of
several chunks together at most `MASK_PAIRS` elements.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

# Work that padding may add, as a share of the real work.
WASTE = 0.25
# A product of its own costs about as much as this many (query, position) pairs, so padding by so many is free.
FREE_PAIRS = 1024
# Chunks in groups need masks of their own, kept for the step.
MASK_PAIRS = 16 << 20


class Member(NamedTuple):
    """One sequence as a kernel sees it; positions count from the start of the sequence."""

    row: int  # of the block tables
    query_start: int  # its first row of q
    query_len: int
    seq_len: int  # positions visible to its last query, which stands at seq_len - 1
    first: int  # lowest position that any of its queries sees

    @property
    def reach(self) -> int:
        """Positions that any of its queries sees: [first, seq_len)."""
        return self.seq_len - self.first

    @property
    def query_column(self) -> int:
        """Where its first query stands, counted from `first`."""
        return self.reach - self.query_len


@dataclass(slots=True)
class _Group:
    """A group that still grows."""

    members: list[Member] = field(default_factory=list)
    pairs: int = 0  # (query, position) pairs without padding
    query_len: int = 0
    reach: int = 0

    def padded_with(self, member: Member) -> tuple[int, int]:
        """Rows, and (query, position) pairs with padding, if `member` joined."""
        rows = (len(self.members) + 1) * max(self.reach, member.reach)
        return rows, rows * max(self.query_len, member.query_len)

    def add(self, member: Member) -> None:
        self.members.append(member)
        self.pairs += member.query_len * member.reach
        self.query_len = max(self.query_len, member.query_len)
        self.reach = max(self.reach, member.reach)


def group_members(members: list[Member], max_rows: int) -> list[list[Member]]:
    """`members` in groups, each in order of its queries; at most `max_rows` padded rows a group, or one sequence."""
    groups: list[_Group] = []
    mask_pairs_left = MASK_PAIRS
    for member in sorted(members, key=lambda m: (m.query_len, m.reach)):
        last = groups[-1] if groups else _Group()
        rows, padded = last.padded_with(member)
        pairs = last.pairs + member.query_len * member.reach
        is_alike = (last.query_len == 1) == (member.query_len == 1) and padded <= (1 + WASTE) * pairs + FREE_PAIRS
        has_room = rows <= max_rows and (member.query_len == 1 or padded <= mask_pairs_left)
        if not (last.members and is_alike and has_room):
            if len(last.members) > 1 and last.query_len > 1:
                mask_pairs_left -= len(last.members) * last.query_len * last.reach
            last = _Group()
            groups.append(last)
        last.add(member)
    return [sorted(group.members, key=lambda m: m.query_start) for group in groups]
