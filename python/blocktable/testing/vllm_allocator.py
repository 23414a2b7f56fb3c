"""vLLM's own `BlockPool` as an allocator that this kit can test. Written for vLLM 0.32; needs it installed.

Before: the calls of a test. After: the same calls on `vllm.v1.core.block_pool.BlockPool`. Its tables, forks and cuts are
composed here from `get_new_blocks`, `touch` and `free_blocks`, in the way of its single-type manager: a sequence is freed last
block first.
"""

from collections.abc import Iterator, Sequence
from itertools import islice
from types import SimpleNamespace
from typing import Any

from .allocator import Copy, PoolFull


class VllmAllocator:
    """Implements `Allocator`."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        from vllm.utils.hashing import sha256_cbor
        from vllm.v1.core.block_pool import BlockPool
        from vllm.v1.core.kv_cache_utils import hash_block_tokens, init_none_hash

        init_none_hash(sha256_cbor)
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.pool: Any = BlockPool(num_gpu_blocks=num_blocks, enable_caching=True, hash_block_size=block_size)
        self._hash: Any = lambda parent, tokens: hash_block_tokens(sha256_cbor, parent, tokens, None)
        self._tables: dict[int, list[Any]] = {}
        self._tokens: dict[int, list[int]] = {}

    def match(self, name: int, tokens: Sequence[int]) -> int:
        table: list[Any] = []
        for key in islice(self._keys(tokens), (len(tokens) - 1) // self.block_size):
            found = self.pool.get_cached_block(key, [0])
            if found is None:
                break
            table.append(found[0])
        self.pool.touch(table)
        self._tables[name] = table
        self._tokens[name] = list(tokens[: len(table) * self.block_size])
        return len(self._tokens[name])

    def append(self, name: int, tokens: Sequence[int]) -> list[Copy]:
        table, rows = self._tables[name], len(self._tokens[name])
        tail, offset = divmod(rows, self.block_size)
        must_replace = bool(tokens) and offset > 0 and not self.pool.is_block_writable(table[tail])
        lacking = -(-(rows + len(tokens)) // self.block_size) - len(table)
        if lacking + must_replace > self.pool.get_num_free_blocks():
            raise PoolFull
        copies = []
        if must_replace:
            source, (table[tail],) = table[tail], self.pool.get_new_blocks(1)
            self.pool.free_blocks([source])
            copies.append((source.block_id, table[tail].block_id, offset))
        table.extend(self.pool.get_new_blocks(lacking))
        self._tokens[name].extend(tokens)
        return copies

    def publish(self, name: int) -> None:
        table, keys = self._tables[name], list(self._keys(self._tokens[name]))
        request = SimpleNamespace(block_hashes=keys)
        for number in range(len(keys)):
            if table[number].block_hash is None:  # a fork's blocks may have been published by its parent
                self.pool.cache_full_blocks(request, table, number, number + 1, self.block_size, 0)

    def fork(self, name: int, child: int) -> None:
        self._tables[child] = list(self._tables[name])
        self._tokens[child] = list(self._tokens[name])
        self.pool.touch(self._tables[child])

    def truncate(self, name: int, num_tokens: int) -> None:
        kept = -(-num_tokens // self.block_size)
        self.pool.free_blocks(reversed(self._tables[name][kept:]))
        del self._tables[name][kept:]
        del self._tokens[name][num_tokens:]

    def release(self, name: int) -> None:
        del self._tokens[name]
        self.pool.free_blocks(reversed(self._tables.pop(name)))

    def forget(self) -> None:
        self.pool.evict_blocks({block.block_id for block in self.pool.blocks if block.ref_cnt == 0 and not block.is_null})

    def blocks(self, name: int) -> list[int]:
        return [block.block_id for block in self._tables[name]]

    def free(self) -> list[int]:
        return [block.block_id for block in self.pool.free_block_queue.get_all_free_blocks()]

    def holders(self) -> list[int]:
        return [0 if block.is_null else block.ref_cnt for block in self.pool.blocks]

    def published(self) -> list[int]:
        return [block.block_id for block in self.pool.blocks if block.block_hash is not None]

    def _keys(self, tokens: Sequence[int]) -> Iterator[Any]:
        """Keys of the full blocks."""
        parent = None
        for start in range(0, len(tokens) - self.block_size + 1, self.block_size):
            parent = self._hash(parent, tokens[start : start + self.block_size])
            yield parent
