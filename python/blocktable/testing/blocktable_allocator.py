"""`blocktable.BlockPool` and what goes with it, as an allocator that this kit can test.

Before: the calls of a test. After: the same calls on the compiled core, whose own audit runs after each.
"""

from collections.abc import Callable, Sequence
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from blocktable._core import BlockPool, BlockTable, PrefixCache
from blocktable.errors import OutOfBlocksError

from .allocator import Copy, PoolFull

Result = TypeVar("Result")


def ids(array: NDArray[np.int32]) -> list[int]:
    """A copy as plain numbers."""
    return [int(number) for number in array]


class BlocktableAllocator:
    """Implements `Allocator`."""

    def __init__(self, num_blocks: int, block_size: int, *, finds_parts: bool = False) -> None:
        self.pool = BlockPool(num_blocks, block_size, enable_partial_hits=finds_parts)
        self.finds_parts = finds_parts
        self.cache = PrefixCache(self.pool)
        self.tables: dict[int, BlockTable] = {}
        self._tokens: dict[int, list[int]] = {}

    @property
    def num_blocks(self) -> int:
        return self.pool.num_blocks

    @property
    def block_size(self) -> int:
        return self.pool.block_size

    def match(self, name: int, tokens: Sequence[int]) -> int:
        self.tables[name], cached = self.cache.match(list(tokens))
        self._tokens[name] = list(tokens[:cached])
        self.pool.audit()
        return cached

    def append(self, name: int, tokens: Sequence[int]) -> list[Copy]:
        copies = self._checked(lambda: self.tables[name].append(len(tokens))[1])
        self._tokens[name].extend(tokens)
        return copies

    def publish(self, name: int) -> None:
        self._checked(lambda: self.cache.publish(self.tables[name], self._tokens[name]))

    def fork(self, name: int, child: int) -> None:
        self.tables[child] = self._checked(self.tables[name].fork)
        self._tokens[child] = list(self._tokens[name])

    def truncate(self, name: int, num_tokens: int) -> None:
        self._checked(lambda: self.tables[name].truncate(num_tokens))
        del self._tokens[name][num_tokens:]

    def release(self, name: int) -> None:
        del self._tokens[name]
        self._checked(self.tables.pop(name).release)

    def forget(self) -> None:
        self._checked(self.cache.reset)

    def blocks(self, name: int) -> list[int]:
        return ids(self.tables[name].blocks)

    def free(self) -> list[int]:
        return ids(self.pool.free_queue())

    def holders(self) -> list[int]:
        return ids(self.pool.block_refs())

    def published(self) -> list[int]:
        return ids(self.pool.published_blocks())

    def _checked(self, call: Callable[[], Result]) -> Result:
        """The call, and the core's own audit, whatever came of it."""
        try:
            return call()
        except OutOfBlocksError as refusal:
            raise PoolFull from refusal
        finally:
            self.pool.audit()
