"""An allocator of lists and dicts: the rules of `blocktable.BlockPool`, its tables and its prefix cache, to be read.

Before: the same calls that another allocator gets. After: the answers that it must give. Nothing here is fast, and every rule
stands in one place. The order of the free queue is vLLM 0.32's: what a sequence frees goes last block first, content that
nobody can find before the head, published content behind the tail.
"""

from collections.abc import Iterable, Sequence

from .allocator import Copy, PoolFull


class PlainAllocator:
    """Implements `Allocator`."""

    def __init__(self, num_blocks: int, block_size: int, *, finds_parts: bool = False) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.finds_parts = finds_parts
        self._queue = list(range(1, num_blocks))
        self._holders = [0] * num_blocks
        self._content: dict[int, tuple[int, ...]] = {}  # published block -> all tokens up to its end, oldest first
        self._tables: dict[int, list[int]] = {}
        self._tokens: dict[int, list[int]] = {}

    def match(self, name: int, tokens: Sequence[int]) -> int:
        table: list[int] = []
        for end in range(self.block_size, len(tokens), self.block_size):  # the last token is always computed
            block = self._find(tuple(tokens[:end]))
            if block is None:
                break
            table.append(block)
        source, rows = self._part(tuple(tokens), len(table) * self.block_size)
        self._tokens[name] = list(tokens[: len(table) * self.block_size + rows])
        table += [source] if rows else []
        for block in table:
            if self._holders[block] == 0:
                self._queue.remove(block)
            self._holders[block] += 1
        self._tables[name] = table
        return len(self._tokens[name])

    def append(self, name: int, tokens: Sequence[int]) -> list[Copy]:
        table, rows = self._tables[name], len(self._tokens[name])
        tail, offset = divmod(rows, self.block_size)
        must_replace = bool(tokens) and offset > 0 and not self._is_private(table[tail])
        lacking = -(-(rows + len(tokens)) // self.block_size) - len(table)
        if lacking + must_replace > len(self._queue):
            raise PoolFull
        copies = []
        if must_replace:
            source, target = table[tail], self._take()
            table[tail] = target
            self._drop([source])
            copies.append((source, target, offset))
        table.extend(self._take() for _ in range(lacking))
        self._tokens[name].extend(tokens)
        return copies

    def publish(self, name: int) -> None:
        tokens = self._tokens[name]
        for block, end in zip(self._tables[name], range(self.block_size, len(tokens) + 1, self.block_size)):
            self._content.setdefault(block, tuple(tokens[:end]))

    def fork(self, name: int, child: int) -> None:
        self._tables[child] = list(self._tables[name])
        self._tokens[child] = list(self._tokens[name])
        for block in self._tables[child]:
            self._holders[block] += 1

    def truncate(self, name: int, num_tokens: int) -> None:
        kept = -(-num_tokens // self.block_size)
        self._drop(self._tables[name][kept:])
        del self._tables[name][kept:]
        del self._tokens[name][num_tokens:]

    def release(self, name: int) -> None:
        del self._tokens[name]
        self._drop(self._tables.pop(name))

    def forget(self) -> None:
        for block in [block for block in self._content if self._holders[block] == 0]:
            del self._content[block]

    def blocks(self, name: int) -> list[int]:
        return list(self._tables[name])

    def free(self) -> list[int]:
        return list(self._queue)

    def holders(self) -> list[int]:
        return list(self._holders)

    def published(self) -> list[int]:
        return sorted(self._content)

    def _find(self, content: tuple[int, ...]) -> int | None:
        """The block that has carried this content for longest."""
        return next((block for block, found in self._content.items() if found == content), None)

    def _part(self, tokens: tuple[int, ...], start: int) -> tuple[int, int]:
        """(block, rows): the block with most of the tokens from `start` on. Of equals the last that stands before them, in the
        order of their tokens, or else the first behind. (0, 0) if none has a quarter of a block."""
        wanted = tokens[start : len(tokens) - 1][: self.block_size]
        known: dict[tuple[int, ...], int] = {}
        for block, content in self._content.items():
            if self.finds_parts and len(content) == start + self.block_size and content[:start] == tokens[:start]:
                known.setdefault(content[start:], block)
        near = [tail for tail in known if common(tail, wanted) * 4 >= self.block_size]
        before = sorted(tail for tail in near if tail <= wanted)[-1:]
        behind = sorted(tail for tail in near if tail > wanted)[:1]
        tail = max(before + behind, key=lambda tail: common(tail, wanted), default=())
        return known.get(tail, 0), common(tail, wanted)

    def _is_private(self, block: int) -> bool:
        return self._holders[block] == 1 and block not in self._content

    def _take(self) -> int:
        block = self._queue.pop(0)
        self._holders[block] = 1
        self._content.pop(block, None)
        return block

    def _drop(self, blocks: Iterable[int]) -> None:
        """One holder less for each, the last one first."""
        freed = []
        for block in reversed(list(blocks)):
            self._holders[block] -= 1
            if self._holders[block] == 0:
                freed.append(block)
        hidden = [block for block in freed if block not in self._content]
        self._queue = hidden + self._queue + [block for block in freed if block in self._content]


def common(one: Sequence[object], other: Sequence[object]) -> int:
    """How many of the first of both are the same."""
    return next((at for at, pair in enumerate(zip(one, other)) if pair[0] != pair[1]), min(len(one), len(other)))
