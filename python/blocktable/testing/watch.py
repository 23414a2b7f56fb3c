"""Watches an allocator: passes each call on, and checks every promise after it.

Before: a test, a state machine or a script that says what happens. After: nothing, or `BrokenPromise` at the first call that
breaks one, with the calls up to there. What always holds: the watch never corrects the allocator, and takes nothing from it
on trust: it counts the holders from the tables, and reads every row of every sequence again through its table.

The promises: A1 every block is free, held or block 0. A2 a block has as many holders as table entries name it. A3 it is in the
free queue once if nobody holds it, else not at all. A4 what can be found was published and is still there. A5 who writes a
row is its block's only holder, and nobody can find the block. I4 a refused call changes nothing. I5 what a match returns is
held. `hit`: a match is as long as it can be, and leaves the last token. `refusal`: nobody is refused who fits. `content`: a
sequence reads what it wrote. `model`: if there is one, it gives the same answers in the same order.
"""

from collections.abc import Callable, Sequence
from typing import TypeVar

from .allocator import Allocator, Copy, Picture, PoolFull
from .audit import BrokenPromise
from .call import Call
from .plain_allocator import common
from .shadow_memory import ShadowMemory, digests

Result = TypeVar("Result")


class _Full:
    """The answer of an allocator that has no room."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Full)

    __hash__ = None  # type: ignore[assignment]


def _or_full(call: Callable[[Allocator], Result], allocator: Allocator) -> Result | _Full:
    try:
        return call(allocator)
    except PoolFull:
        return _Full()


def _told(answer: object) -> object:
    return "that the pool is full" if isinstance(answer, _Full) else answer


class Watch:
    """Owns `allocator`, the memory behind it, and the tokens of each sequence. `model` must do the same in everything."""

    def __init__(self, allocator: Allocator, model: Allocator | None = None) -> None:
        self.allocator = allocator
        self.model = model
        self.tokens: dict[int, list[int]] = {}
        self.calls: list[Call] = []
        self.is_broken = False
        self._memory = ShadowMemory(allocator.num_blocks, allocator.block_size)
        self._named: dict[int, int] = {}  # published block -> the row that its last one must be
        self._check()

    def match(self, name: int, tokens: Sequence[int]) -> int:
        """Begin `name` with what is known of `tokens`; returns how many tokens that is."""
        longest = self._longest_hit(tokens)
        cached = self._call(Call("match", name, tuple(tokens)), lambda allocator: allocator.match(name, tokens))
        if cached != longest:
            raise self._broken("hit", f"{cached} of {len(tokens)} tokens were found, {longest} are published and may be")
        self.tokens[name] = list(tokens[:cached])
        self._check()
        return cached

    def append(self, name: int, tokens: Sequence[int]) -> bool:
        """Write tokens behind `name`; whether there was room."""
        rows, needed = len(self.tokens[name]), self._needed(name, len(tokens))
        free = len(self.allocator.free())
        before = Picture.of(self.allocator, list(self.tokens))
        try:
            copies = self._call(Call("append", name, tuple(tokens)), lambda allocator: allocator.append(name, tokens))
        except PoolFull:
            if needed <= free:
                raise self._broken("refusal", f"{needed} blocks are needed, {free} are free") from None
            if Picture.of(self.allocator, list(self.tokens)) != before:
                raise self._broken("I4", f"a refused call changed {before}") from None
            return False
        self._copy(copies)
        self._write(name, rows, tokens)
        self._check()
        return True

    def publish(self, name: int) -> None:
        """What is written of `name` may be found."""
        self._call(Call("publish", name), lambda allocator: allocator.publish(name))
        size, rows = self.allocator.block_size, digests(self.tokens[name])
        full = dict(zip(self.allocator.blocks(name), rows[size - 1 :: size]))
        self._named = full | self._named
        missing = set(full.values()) - {self._named.get(block) for block in self.allocator.published()}
        if missing:
            raise self._broken("A4", f"{len(missing)} full blocks of {name} were published and cannot be found")
        self._check()

    def fork(self, name: int, child: int) -> None:
        """Begin `child` as `name` is."""
        self._call(Call("fork", name, number=child), lambda allocator: allocator.fork(name, child))
        self.tokens[child] = list(self.tokens[name])
        self._check()

    def truncate(self, name: int, num_tokens: int) -> None:
        """Keep the first tokens of `name`."""
        self._call(Call("truncate", name, number=num_tokens), lambda allocator: allocator.truncate(name, num_tokens))
        del self.tokens[name][num_tokens:]
        self._check()

    def release(self, name: int) -> None:
        """End `name`."""
        self._call(Call("release", name), lambda allocator: allocator.release(name))
        del self.tokens[name]
        self._check()

    def forget(self) -> None:
        """Forget what nobody holds."""
        self._call(Call("forget"), lambda allocator: allocator.forget())
        holders = self.allocator.holders()
        if kept := [block for block in self.allocator.published() if holders[block] == 0]:
            raise self._broken("A4", f"blocks {kept} are held by nobody and can be found after all was forgotten")
        self._check()

    def drain(self) -> None:
        """End all sequences; then every block must be free."""
        for name in list(self.tokens):
            self.release(name)
        free = self.allocator.free()
        if len(free) != self.allocator.num_blocks - 1:
            raise self._broken("drain", f"nobody lives, and {len(free)} of {self.allocator.num_blocks - 1} blocks are free")

    def _call(self, call: Call, make: Callable[[Allocator], Result]) -> Result:
        """The call on the allocator and on its model. Whatever goes wrong says which calls led there."""
        self.calls.append(call)
        try:
            return self._answer(make)
        except (PoolFull, BrokenPromise):
            raise
        except Exception as error:
            self.is_broken = True
            error.add_note("after " + "; ".join(map(str, self.calls)))
            raise

    def _answer(self, call: Callable[[Allocator], Result]) -> Result:
        """The allocator's answer, or `PoolFull`, if its model has the same one."""
        answer = _or_full(call, self.allocator)
        if self.model is not None and (wanted := _or_full(call, self.model)) != answer:
            raise self._broken("model", f"the answer is {_told(answer)}, the model's {_told(wanted)}")
        if isinstance(answer, _Full):
            raise PoolFull
        return answer

    def _longest_hit(self, tokens: Sequence[int]) -> int:
        """The longest published prefix, without the last token; with rows of one more block, if those are found."""
        size = self.allocator.block_size
        known = {self._named.get(block) for block in self.allocator.published()}
        count = 0
        for row in digests(tokens)[size - 1 : -1 : size]:
            if row not in known:
                break
            count += size
        if not getattr(self.allocator, "finds_parts", False):
            return count
        wanted = digests(tokens)[count:-1][:size]
        rows = max((common(self._memory.read([block], size), wanted) for block in self.allocator.published()), default=0)
        return count + (rows if rows * 4 >= size else 0)

    def _needed(self, name: int, count: int) -> int:
        """Free blocks that so many tokens more need."""
        size, rows, table = self.allocator.block_size, len(self.tokens[name]), self.allocator.blocks(name)
        lacking = max(0, -(-(rows + count) // size) - len(table))
        if count == 0 or rows % size == 0:
            return lacking
        tail = table[rows // size]
        return lacking + (self.allocator.holders()[tail] > 1 or tail in self.allocator.published())

    def _copy(self, copies: Sequence[Copy]) -> None:
        for source, target, rows in copies:
            self._memory.copy(source, target, rows)

    def _write(self, name: int, start: int, tokens: Sequence[int]) -> None:
        size, table = self.allocator.block_size, self.allocator.blocks(name)
        end = start + len(tokens)
        if -(-end // size) > len(table):
            raise self._broken("A2", f"{name} has {end} tokens and {len(table)} blocks")
        holders, published = self.allocator.holders(), set(self.allocator.published())
        for block in table[start // size : -(-end // size)] if tokens else ():
            if holders[block] != 1 or block in published:
                what = "can be found by its content" if block in published else f"has {holders[block]} holders"
                raise self._broken("A5", f"{name} writes into block {block}, which {what}")
        self.tokens[name].extend(tokens)
        self._memory.write(table, start, digests(self.tokens[name])[start:])

    def _check(self) -> None:
        """All promises about the state between two calls."""
        seen = Picture.of(self.allocator, list(self.tokens))
        self._check_counts(seen)
        self._check_names(seen)
        for name, tokens in self.tokens.items():
            rows = self._memory.read(seen.tables[name], len(tokens))
            if rows != digests(tokens):
                at = next(at for at, pair in enumerate(zip(rows, digests(tokens))) if pair[0] != pair[1])
                what = "nothing that may be read" if rows[at] is None else "the row of another"
                raise self._broken(
                    "content", f"token {at} of {name} finds {what} in block {seen.tables[name][at // self._size]}"
                )
        for block in seen.free:
            if block not in self._named:
                self._memory.poison(block)
        if self.model is not None and seen != (wanted := Picture.of(self.model, list(self.tokens))):
            raise self._broken("model", f"there is {seen}, the model has {wanted}")

    @property
    def _size(self) -> int:
        return self.allocator.block_size

    def _check_counts(self, seen: Picture) -> None:
        """A1 to A3, and that tables are as long as their tokens need."""
        total = self.allocator.num_blocks
        entries = [0] * total
        for name, table in seen.tables.items():
            if bad := [block for block in table if not 0 < block < total]:
                raise self._broken("A2", f"{name} names blocks {bad}, must be 1..{total - 1}")
            if len(table) * self._size < len(self.tokens[name]):
                raise self._broken("A2", f"{name} has {len(self.tokens[name])} tokens and blocks {table}")
            for block in table:
                entries[block] += 1
        if seen.holders != entries:
            wrong = {
                block: (seen.holders[block], entries[block]) for block in range(total) if seen.holders[block] != entries[block]
            }
            raise self._broken("A2", f"block: (holders, entries in tables) are {wrong}")
        if len(set(seen.free)) != len(seen.free) or not all(0 < block < total for block in seen.free):
            raise self._broken("A3", f"the free queue is {seen.free}")
        if both := [block for block in seen.free if entries[block]]:
            raise self._broken("A3", f"blocks {both} are free and held")
        if len(seen.free) + sum(count > 0 for count in entries) + 1 != total:
            lost = sorted(set(range(1, total)) - set(seen.free) - {block for block in range(total) if entries[block]})
            raise self._broken("A1", f"blocks {lost} are neither free nor held")

    def _check_names(self, seen: Picture) -> None:
        """A4: what can be found was published, and its rows are still those."""
        for block in seen.published:
            if block not in self._named:
                raise self._broken("A4", f"block {block} can be found and was never published, or was handed out since")
            if self._memory.last_row(block) != self._named[block]:
                raise self._broken("A4", f"block {block} can be found by content that it does not hold any more")
        self._named = {block: row for block, row in self._named.items() if block in seen.published}

    def _broken(self, promise: str, detail: str) -> BrokenPromise:
        self.is_broken = True
        return BrokenPromise(promise, detail, tuple(map(str, self.calls)))
