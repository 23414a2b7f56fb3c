"""Seeded scripts over any allocator: long random runs, and the same script on two allocators side by side.

Before: a seed. After: a count of what was met, or the first broken promise. What always holds: the same seed gives the same
calls to allocators that answer the same.
"""

import random
from collections import Counter
from contextlib import suppress

from .allocator import MakeAllocator
from .call import Call
from .watch import Watch

Calls = tuple[Call, ...]
MOST_LIVE = 8


def run_allocator_script(
    seed: int, make: MakeAllocator, *, model: MakeAllocator | None = None, calls: int = 80
) -> Counter[str]:
    """Play one script; with a `model`, on both, which must agree in ids, order, hits, evictions and refusals after every
    call."""
    return _Script(seed, make, model).run(calls)


def script_of(seed: int, make: MakeAllocator, calls: int = 80) -> tuple[int, int, Calls]:
    """(num_blocks, block_size, calls) of one script, as far as it goes on this allocator."""
    script = _Script(seed, make, None)
    with suppress(Exception):  # who plays the calls again will meet it
        script.run(calls)
    return script.watch.allocator.num_blocks, script.watch.allocator.block_size, tuple(script.watch.calls)


class _Script:
    """One pool and what is done to it."""

    def __init__(self, seed: int, make: MakeAllocator, model: MakeAllocator | None) -> None:
        self.rng = random.Random(seed)
        sizes = self.rng.choice((3, 6, 12, 40)), self.rng.choice((1, 2, 4, 16))
        self.watch = Watch(make(*sizes), None if model is None else model(*sizes))
        self.block_size = sizes[1]
        self.roots = [self._tokens(4 * self.block_size, 50) for _ in range(3)]
        self.met: Counter[str] = Counter()
        self.started = 0

    def run(self, calls: int) -> Counter[str]:
        kinds = {
            self._start: 5, self._append: 8, self._publish: 6, self._fork: 2, self._truncate: 2, self._release: 4,
            self._forget: 0.1,
        }  # fmt: skip
        for _ in range(calls):
            published = set(self.watch.allocator.published())
            (kind,) = self.rng.choices(list(kinds), list(kinds.values()))
            if self.watch.tokens or kind == self._start:
                kind()
                self.met[kind.__name__.strip("_")] += 1
            self.met["evicted"] += len(published - set(self.watch.allocator.published()))
        self.watch.drain()
        return self.met

    def _start(self) -> None:
        if len(self.watch.tokens) >= MOST_LIVE:
            self._release()
        head = self.rng.choice(self.roots)[: self.rng.randrange(4 * self.block_size + 1)]
        prompt = head + self._tokens(self.rng.randrange(1, 2 * self.block_size + 2), self.rng.choice((1, 50)))
        cached = self.watch.match(self.started, prompt)
        self.met["cached"] += cached
        if not self.watch.append(self.started, prompt[cached:]):
            self.met["refused"] += 1
            self.watch.release(self.started)
        self.started += 1

    def _append(self) -> None:
        count = self.rng.choice((1, 1, 1, 2, self.block_size))
        self.met["refused"] += not self.watch.append(self._anyone(), self._tokens(count, 50))

    def _publish(self) -> None:
        self.watch.publish(self._anyone())

    def _fork(self) -> None:
        self.watch.fork(self._anyone(), self.started)
        self.started += 1

    def _truncate(self) -> None:
        name = self._anyone()
        self.watch.truncate(name, self.rng.randrange(len(self.watch.tokens[name]) + 1))

    def _release(self) -> None:
        self.watch.release(self._anyone())

    def _forget(self) -> None:
        self.watch.forget()

    def _anyone(self) -> int:
        return self.rng.choice(list(self.watch.tokens))

    def _tokens(self, count: int, alphabet: int) -> list[int]:
        return [self.rng.randrange(alphabet) for _ in range(count)]
