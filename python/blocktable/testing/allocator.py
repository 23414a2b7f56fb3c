"""What a block allocator has to offer so that this kit can test it, and what it looks like at one moment.

Before: an allocator of any kind, in Python or behind a border. After: an adapter of a few lines that implements `Allocator`;
`blocktable_allocator.py`, `plain_allocator.py` and `vllm_allocator.py` are three. Sequences have names that the caller chooses.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

Copy = tuple[int, int, int]
"""(source block, target block, rows), to be copied before anything else is written."""


class PoolFull(Exception):
    """Raised by an adapter when a call needs more blocks than are free. The call must have changed nothing."""


class Allocator(Protocol):
    """A pool of blocks, the tables of sequences, and a prefix cache over them. Block 0 is never handed out.

    One whose matches may end inside a block says so by an attribute `finds_parts` that is true; see `match`.
    """

    @property
    def num_blocks(self) -> int:
        """Blocks in all, block 0 among them."""

    @property
    def block_size(self) -> int:
        """Tokens a block."""

    def match(self, name: int, tokens: Sequence[int]) -> int:
        """Begin sequence `name` with the longest published prefix of `tokens`, but never all of them: of full blocks, and, if
        parts are found, of the rows behind them that some published block holds, if these are a quarter of a block at least.
        Returns the tokens found. Their blocks are held when this returns."""

    def append(self, name: int, tokens: Sequence[int]) -> Sequence[Copy]:
        """Make room for more tokens; what may not be written over is replaced first, by a copy. Raises `PoolFull`."""

    def publish(self, name: int) -> None:
        """All rows so far are written: full blocks may be found by their content from now on."""

    def fork(self, name: int, child: int) -> None:
        """Begin sequence `child` as a copy of `name`, over the same blocks."""

    def truncate(self, name: int, num_tokens: int) -> None:
        """Keep the first `num_tokens` tokens, and the blocks that they need."""

    def release(self, name: int) -> None:
        """End sequence `name` and give its blocks back."""

    def forget(self) -> None:
        """Forget all published content that nobody holds."""

    def blocks(self, name: int) -> list[int]:
        """Blocks of a sequence, in the order of its tokens."""

    def free(self) -> list[int]:
        """Free blocks, the next one to be taken first."""

    def holders(self) -> list[int]:
        """[num_blocks] how many table entries name each block."""

    def published(self) -> list[int]:
        """Blocks whose content can be found, ascending."""


MakeAllocator = Callable[[int, int], Allocator]
"""(num_blocks, block_size) -> a new allocator. A class with such a constructor is one."""


@dataclass(frozen=True, slots=True)
class Picture:
    """All that can be seen of an allocator at one moment."""

    free: list[int]
    holders: list[int]
    published: list[int]
    tables: dict[int, list[int]]

    @classmethod
    def of(cls, allocator: Allocator, names: Sequence[int]) -> "Picture":
        tables = {name: list(allocator.blocks(name)) for name in names}
        return cls(list(allocator.free()), list(allocator.holders()), list(allocator.published()), tables)
