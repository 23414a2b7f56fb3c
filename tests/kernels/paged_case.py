"""A paged case: sequences with keys and values at positions, and the same rows spread over the blocks of a pool.

Before: a test says lengths and geometry. After: it runs the kernel on the pool and compares with dense attention over the
positions. Always: the cache views are strided (another layer's rows lie before, other bytes behind, in every block), block
ids are shuffled, the null block 0 belongs to nobody, and every byte that no sequence sees holds `unseen`.
"""

import math
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from blocktable.kernels.dense import dense_attention
from tests.kernels.implementations import Implementation


@dataclass(frozen=True)
class Shape:
    """The geometry of a layer, and what its attention does besides."""

    block_size: int = 16
    kv_heads: int = 2
    grouped: int = 2  # query heads of each KV head
    key_width: int = 8
    value_width: int = 8
    window: int = 0
    softcap: float = 0.0
    has_sinks: bool = False
    has_slopes: bool = False
    dtype: torch.dtype = torch.float32
    spare: int = 0  # elements behind the last layer in every block; 5 puts no row where a multiple of its width is

    @property
    def query_heads(self) -> int:
        return self.kv_heads * self.grouped

    @property
    def block_elements(self) -> int:
        """Elements of one layer in one block."""
        return self.kv_heads * self.block_size * (self.key_width + self.value_width)


@dataclass(frozen=True)
class Length:
    """One sequence: it sees `seq_len` positions with its last query."""

    query_len: int
    seq_len: int
    shares: int = 0  # positions that it shares with the sequence before it: their full blocks, or all of it


@dataclass
class Case:
    """Everything that one call of the kernel needs, and the positions behind it."""

    shape: Shape
    lengths: list[Length]
    tables: Tensor  # [S, max_blocks] int32
    query_starts: Tensor  # [S + 1] int32
    seq_lens: Tensor  # [S] int32
    q: Tensor  # [T, Hq, Dk]
    keys: list[Tensor]  # each [seq_len, Hkv, Dk]
    values: list[Tensor]  # each [seq_len, Hkv, Dv]
    sinks: Tensor | None
    num_blocks: int
    options: dict[str, Any] = field(default_factory=dict)

    def pool(self, unseen: float) -> tuple[Tensor, Tensor, Tensor]:
        """The whole pool, and the K and V views of its second layer, with `unseen` in every byte that nobody sees."""
        pool, k_cache, v_cache = empty_pool(self.shape, self.num_blocks, unseen)
        for index, length in enumerate(self.lengths):
            first = max(0, length.seq_len - length.query_len + 1 - self.shape.window) if self.shape.window else 0
            for position in range(first if length.query_len else length.seq_len, length.seq_len):
                block, offset = self.slot(index, position)
                k_cache[block, :, offset] = self.keys[index][position]
                v_cache[block, :, offset] = self.values[index][position]
        return pool, k_cache, v_cache

    def slot(self, sequence: int, position: int) -> tuple[int, int]:
        """Block and offset of a position."""
        size = self.shape.block_size
        return int(self.tables[sequence, position // size]), position % size

    def run(self, kernels: Implementation, k_cache: Tensor, v_cache: Tensor) -> Tensor:
        """The kernel's answer, [T, Hq, Dv]."""
        batch = kernels.build(self.tables, self.query_starts, self.seq_lens, self.shape.block_size)
        return kernels.paged_attention(self.q, k_cache, v_cache, batch, **self.options)

    def expected(self) -> Tensor:
        """The same over positions, [T, Hq, Dv] float64."""
        parts = [self.q.new_empty(0, self.shape.query_heads, self.shape.value_width).double()]
        for index in range(len(self.lengths)):
            q = self.q[self.query_starts[index] : self.query_starts[index + 1]]
            parts.append(dense_attention(q, self.keys[index], self.values[index], **self.options))
        return torch.cat(parts)

    def queries_of(self, sequence: int) -> slice:
        """Its rows of q."""
        return slice(int(self.query_starts[sequence]), int(self.query_starts[sequence + 1]))


def empty_pool(shape: Shape, num_blocks: int, fill: float) -> tuple[Tensor, Tensor, Tensor]:
    """A pool [num_blocks, three layers and what is spare] full of `fill`, and the K and V views of the second layer."""
    pool = torch.full((num_blocks, 3 * shape.block_elements + shape.spare), fill, dtype=shape.dtype)
    split = shape.block_elements + shape.kv_heads * shape.block_size * shape.key_width
    k_part, v_part = pool[:, shape.block_elements : split], pool[:, split : 2 * shape.block_elements]
    rows = (num_blocks, shape.kv_heads, shape.block_size)
    return pool, k_part.view(*rows, shape.key_width), v_part.view(*rows, shape.value_width)


def make_case(shape: Shape, lengths: list[Length], *, spread: float = 1.0) -> Case:
    """Random queries, keys and values of these lengths, in shuffled blocks; table columns behind the last block are -1.

    `spread` scales the queries: the larger, the sharper the softmax. Randomness comes from torch's global seed.
    """
    size, total = shape.block_size, sum(length.query_len for length in lengths)
    counts = [-(-length.seq_len // size) for length in lengths]
    num_blocks = sum(counts) + 2
    free = (torch.randperm(num_blocks - 1) + 1).tolist()
    tables = torch.full((len(lengths), max(counts, default=0) + 1), -1, dtype=torch.int32)
    keys: list[Tensor] = []
    values: list[Tensor] = []
    for index, (length, count) in enumerate(zip(lengths, counts, strict=True)):
        keys.append(torch.randn(length.seq_len, shape.kv_heads, shape.key_width).to(shape.dtype))
        values.append(torch.randn(length.seq_len, shape.kv_heads, shape.value_width).to(shape.dtype))
        tables[index, :count] = torch.tensor([free.pop() for _ in range(count)], dtype=torch.int32)
        shared = -(-length.shares // size) if length.shares == length.seq_len else length.shares // size
        rows = min(length.shares, shared * size)
        tables[index, :shared] = tables[index - 1, :shared]
        keys[index][:rows] = keys[index - 1][:rows]
        values[index][:rows] = values[index - 1][:rows]
    sinks = torch.randn(shape.query_heads).to(shape.dtype) if shape.has_sinks else None
    slopes = torch.rand(shape.query_heads) if shape.has_slopes else None
    options = {"scale": 1 / math.sqrt(shape.key_width), "window": shape.window, "softcap": shape.softcap}
    return Case(
        shape,
        lengths,
        tables,
        torch.tensor([0, *(length.query_len for length in lengths)], dtype=torch.int32).cumsum(0, dtype=torch.int32),
        torch.tensor([length.seq_len for length in lengths], dtype=torch.int32),
        (spread * torch.randn(total, shape.query_heads, shape.key_width)).to(shape.dtype),
        keys,
        values,
        sinks,
        num_blocks,
        options | {"sinks": sinks, "slopes": slopes},
    )
