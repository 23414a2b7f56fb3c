"""Allocators that are right but for one thing each, and the promise that each breaks.

Before: `PlainAllocator`. After: the kit must find every one of them, by the promise that is there for it.
"""

from collections.abc import Iterable, Sequence

from blocktable.testing import Copy, PlainAllocator, PoolFull
from blocktable.testing.plain_allocator import common


class LosesBlocks(PlainAllocator):
    """The last block of a longer list is never seen again."""

    def _drop(self, blocks: Iterable[int]) -> None:
        super()._drop(blocks)
        if len(list(blocks)) > 1:
            self._queue.pop(0)


class FindsTooFewRows(PlainAllocator):
    """Says that parts of blocks are found, and finds none."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        super().__init__(num_blocks, block_size, finds_parts=True)

    def _part(self, tokens: tuple[int, ...], start: int) -> tuple[int, int]:
        return 0, 0


class FindsForeignRows(FindsTooFewRows):
    """A part of a block is found behind any parent."""

    def _part(self, tokens: tuple[int, ...], start: int) -> tuple[int, int]:
        wanted = tokens[start : len(tokens) - 1][: self.block_size]
        tails = ((content[-self.block_size :], block) for block, content in self._content.items())
        source, rows = max(((block, common(tail, wanted)) for tail, block in tails), key=lambda part: part[1], default=(0, 0))
        return (source, rows) if rows * 4 >= self.block_size else (0, 0)


class CountsNoHolder(PlainAllocator):
    """A hit leaves the queue and counts no holder."""

    def match(self, name: int, tokens: Sequence[int]) -> int:
        cached = super().match(name, tokens)
        for block in self._tables[name]:
            self._holders[block] -= 1
        return cached


class ReturnsIds(PlainAllocator):
    """A match finds blocks and does not hold them."""

    def match(self, name: int, tokens: Sequence[int]) -> int:
        cached = super().match(name, tokens)
        self._drop(self._tables[name])
        return cached


class HitStaysFree(PlainAllocator):
    """A hit counts a holder and stays in the queue."""

    def match(self, name: int, tokens: Sequence[int]) -> int:
        queue = list(self._queue)
        cached = super().match(name, tokens)
        self._queue = queue
        return cached


class QueuesTwice(PlainAllocator):
    """A released sequence is queued twice."""

    def release(self, name: int) -> None:
        blocks = self.blocks(name)
        super().release(name)
        self._queue += [block for block in blocks if self._holders[block] == 0]


class KeepsNames(PlainAllocator):
    """A block that is handed out keeps the name of its old content."""

    def _take(self) -> int:
        block = self._queue.pop(0)
        self._holders[block] = 1
        return block


class ForgetsNothing(PlainAllocator):
    """Nothing is ever forgotten."""

    def forget(self) -> None:
        pass


class PublishesPartialBlocks(PlainAllocator):
    """The last block of a sequence is published before it is full."""

    def publish(self, name: int) -> None:
        super().publish(name)
        if self._tables[name]:
            self._content.setdefault(self._tables[name][-1], tuple(self._tokens[name]))


class PublishesNothing(PlainAllocator):
    """What is published cannot be found."""

    def publish(self, name: int) -> None:
        pass


class WritesInPlace(PlainAllocator):
    """A block that others see is written over."""

    def _is_private(self, block: int) -> bool:
        return True


class CopiesTooLittle(PlainAllocator):
    """A copy leaves the last row out."""

    def append(self, name: int, tokens: Sequence[int]) -> list[Copy]:
        return [(source, target, rows - 1) for source, target, rows in super().append(name, tokens)]


class IgnoresParents(PlainAllocator):
    """A block is found by its own tokens, whatever stands before them."""

    def _find(self, content: tuple[int, ...]) -> int | None:
        own = content[-self.block_size :]
        return next((block for block, found in self._content.items() if found[-self.block_size :] == own), None)


class HitsEverything(PlainAllocator):
    """A match may cover the whole prompt."""

    def match(self, name: int, tokens: Sequence[int]) -> int:
        return super().match(name, [*tokens, 0])


class HitsOneBlock(PlainAllocator):
    """A match stops after the first block."""

    def match(self, name: int, tokens: Sequence[int]) -> int:
        return super().match(name, tokens[: self.block_size + 1])


class KeepsWhatItTook(PlainAllocator):
    """A refused append keeps the blocks that there were."""

    def append(self, name: int, tokens: Sequence[int]) -> list[Copy]:
        try:
            return super().append(name, tokens)
        except PoolFull:
            self._tables[name] += [self._take() for _ in self.free()]
            raise


class KeepsOneBack(PlainAllocator):
    """The last free block is never given."""

    def append(self, name: int, tokens: Sequence[int]) -> list[Copy]:
        needed = -(-(len(self._tokens[name]) + len(tokens)) // self.block_size) - len(self._tables[name])
        if 0 < needed == len(self._queue):
            raise PoolFull
        return super().append(name, tokens)


class FirstBlockFirst(PlainAllocator):
    """A sequence is released from its start."""

    def _drop(self, blocks: Iterable[int]) -> None:
        super()._drop(reversed(list(blocks)))


class Crashes(PlainAllocator):
    """A fork of nothing divides by zero."""

    def fork(self, name: int, child: int) -> None:
        _ = 1 // len(self._tables[name])
        super().fork(name, child)


BROKEN = {
    LosesBlocks: "A1",
    FindsTooFewRows: "hit",
    FindsForeignRows: "hit",
    CountsNoHolder: "A2",
    ReturnsIds: "A2",
    HitStaysFree: "A3",
    QueuesTwice: "A3",
    KeepsNames: "A5",
    ForgetsNothing: "A4",
    PublishesPartialBlocks: "A4",
    PublishesNothing: "A4",
    WritesInPlace: "A5",
    CopiesTooLittle: "content",
    IgnoresParents: "hit",
    HitsEverything: "hit",
    HitsOneBlock: "hit",
    KeepsWhatItTook: "I4",
    KeepsOneBack: "refusal",
    FirstBlockFirst: "model",
    Crashes: "ZeroDivisionError",
}
"""Each broken allocator, and the name under which it must be found."""
