"""A fault of an allocator, as the shortest list of calls that was found to show it.

Before: a way to make an allocator, and perhaps a model of it. After: a `Bug`, or None if no script met one. What always
holds: the same allocator gives the same bug; every list that is tried is played on a new allocator from its start.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from .allocator import MakeAllocator
from .allocator_script import Calls, script_of
from .audit import BrokenPromise
from .call import Call
from .watch import Watch


@dataclass(frozen=True, slots=True)
class Bug:
    """`error` is what the calls raise on a new allocator of this size."""

    num_blocks: int
    block_size: int
    calls: Calls
    error: Exception

    def __str__(self) -> str:
        calls = "\n".join(f"  {call}" for call in self.calls)
        broken = f"{self.kind}: {self.error.detail if isinstance(self.error, BrokenPromise) else self.error}"
        return f"{self.num_blocks} blocks of {self.block_size} tokens:\n{calls}\n{broken}"

    @property
    def kind(self) -> str:
        """Name of the broken promise, or of the exception."""
        return self.error.promise if isinstance(self.error, BrokenPromise) else type(self.error).__name__


def find_bug(make: MakeAllocator, *, model: MakeAllocator | None = None, scripts: int = 200) -> Bug | None:
    """Play so many scripts; the first that breaks a promise, or raises what no adapter should, is made as short as it gets."""
    for seed in range(scripts):
        num_blocks, block_size, calls = script_of(seed, make)
        error = _play(make, model, num_blocks, block_size, calls)
        if error is not None:
            return _shortest(make, model, Bug(num_blocks, block_size, calls, error))
    return None


def _play(
    make: MakeAllocator, model: MakeAllocator | None, num_blocks: int, block_size: int, calls: Sequence[Call]
) -> Exception | None:
    """What the calls raise; calls that mean nothing any more are passed over."""
    try:
        watch = Watch(make(num_blocks, block_size), None if model is None else model(num_blocks, block_size))
        for call in calls:
            call.on(watch)
        watch.drain()
    except Exception as error:  # noqa: BLE001 - whatever an allocator raises is what is looked for
        return error
    return None


def _shortest(make: MakeAllocator, model: MakeAllocator | None, bug: Bug) -> Bug:
    """Take the first smaller case that shows a fault of the same kind, again and again, until none does."""
    while True:
        for num_blocks, block_size, calls in _smaller(bug):
            error = _play(make, model, num_blocks, block_size, calls)
            found = None if error is None else Bug(num_blocks, block_size, calls, error)
            if found is not None and found.kind == bug.kind:
                bug = found
                break
        else:
            return bug


def _smaller(bug: Bug) -> Iterator[tuple[int, int, Calls]]:
    """Cases with fewer calls, then smaller pools, then fewer and smaller tokens."""
    num_blocks, block_size, calls = bug.num_blocks, bug.block_size, bug.calls
    length = len(calls)
    while length:
        for start in range(0, len(calls), length):
            yield num_blocks, block_size, calls[:start] + calls[start + length :]
        length //= 2
    for fewer in {num_blocks // 2, num_blocks - 1} - {0, 1}:
        yield fewer, block_size, calls
    if block_size > 1:
        yield num_blocks, block_size // 2, calls
        yield num_blocks, block_size // 2, tuple(call.halved() for call in calls)
    if any(token for call in calls for token in call.tokens):
        yield num_blocks, block_size, tuple(replace(call, tokens=(0,) * len(call.tokens)) for call in calls)
    for at, call in enumerate(calls):
        for less in call.smaller():
            changed = (*calls[:at], less, *calls[at + 1 :])
            yield num_blocks, block_size, changed
            if num_blocks > 2:
                yield num_blocks - 1, block_size, changed
