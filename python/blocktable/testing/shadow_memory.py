"""KV memory without numbers in it: which token of which chain was written to each row of each block.

Before: the writes and copies that an allocator allows. After: what a sequence would read through its table. A row knows all
tokens up to its own, as a real key-value row depends on them, so a stale, foreign, missing, shifted or half-written row is
seen.
"""

from collections.abc import Iterable, Sequence

Row = int | None
"""A digest of a chain's tokens up to this row; None where nothing may be read."""


def digests(tokens: Iterable[int], before: int = 0) -> list[int]:
    """What the rows of these tokens hold; `before` is the row in front of them, 0 at the start of a chain."""
    rows = []
    for token in tokens:
        before = hash((before, token + 1))  # numbers hash the same in every process
        rows.append(before)
    return rows


class ShadowMemory:
    """`num_blocks` blocks of `block_size` rows."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.block_size = block_size
        self._rows: list[list[Row]] = [[None] * block_size for _ in range(num_blocks)]

    def write(self, table: Sequence[int], start: int, rows: Sequence[int]) -> None:
        """Put rows at the positions from `start` on."""
        for position, row in enumerate(rows, start):
            self._rows[table[position // self.block_size]][position % self.block_size] = row

    def read(self, table: Sequence[int], count: int) -> list[Row]:
        """The first `count` rows that a sequence sees."""
        return [self._rows[table[position // self.block_size]][position % self.block_size] for position in range(count)]

    def copy(self, source: int, target: int, rows: int) -> None:
        """Copy the first rows of a block."""
        self._rows[target][:rows] = self._rows[source][:rows]

    def poison(self, block: int) -> None:
        """Nothing of this block may be read any more."""
        self._rows[block] = [None] * self.block_size

    def last_row(self, block: int) -> Row:
        """The last row of a block, which depends on all tokens up to its end."""
        return self._rows[block][-1]
