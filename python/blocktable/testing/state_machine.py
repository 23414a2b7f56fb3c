"""A state machine over any allocator: Hypothesis chooses the calls, and looks for the shortest list of them that breaks a
promise.

Before: a way to make an allocator. After: a class whose `TestCase` pytest collects. Needs the extra `testing`.
"""

import hypothesis.strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from .allocator import MakeAllocator
from .watch import Watch

MOST_LIVE = 5
"""Sequences at once: more of them show nothing that five do not."""

_WHICH = st.integers(0, MOST_LIVE - 1)
_OWN = st.lists(st.integers(0, 2), max_size=5)


def allocator_machine(make: MakeAllocator, *, model: MakeAllocator | None = None) -> type[RuleBasedStateMachine]:
    """The machine for the allocators that `make(num_blocks, block_size)` makes.

    With a `model`, `PlainAllocator` or another allocator, both get every call and must agree in ids, order, hits and refusals.
    """

    class AllocatorMachine(RuleBasedStateMachine):
        watch: Watch
        started: int

        @initialize(usable=st.integers(1, 6), block_size=st.integers(1, 3))
        def begin(self, usable: int, block_size: int) -> None:
            other = None if model is None else model(usable + 1, block_size)
            self.watch, self.started = Watch(make(usable + 1, block_size), other), 0

        @precondition(lambda self: len(self.watch.tokens) < MOST_LIVE)
        @rule(shared=st.integers(0, 10), own=_OWN, computes=st.booleans())
        def start(self, shared: int, own: list[int], computes: bool) -> None:
            """A prompt: zeros, so that blocks are equal also behind different ones, and an end of its own."""
            prompt = [0] * shared + own
            if prompt:
                cached = self.watch.match(self.started, prompt)
                if computes:
                    self.watch.append(self.started, prompt[cached:])
                self.started += 1

        @precondition(lambda self: self.watch.tokens)
        @rule(which=_WHICH, tokens=_OWN)
        def append(self, which: int, tokens: list[int]) -> None:
            self.watch.append(self._name(which), tokens)

        @precondition(lambda self: self.watch.tokens)
        @rule(which=_WHICH)
        def publish(self, which: int) -> None:
            self.watch.publish(self._name(which))

        @precondition(lambda self: 0 < len(self.watch.tokens) < MOST_LIVE)
        @rule(which=_WHICH)
        def fork(self, which: int) -> None:
            self.watch.fork(self._name(which), self.started)
            self.started += 1

        @precondition(lambda self: self.watch.tokens)
        @rule(which=_WHICH, cut=st.integers(0, 8))
        def truncate(self, which: int, cut: int) -> None:
            name = self._name(which)
            self.watch.truncate(name, max(0, len(self.watch.tokens[name]) - cut))

        @precondition(lambda self: self.watch.tokens)
        @rule(which=_WHICH)
        def release(self, which: int) -> None:
            self.watch.release(self._name(which))

        @rule()
        def forget(self) -> None:
            self.watch.forget()

        def teardown(self) -> None:
            """Whatever was called: it drains. A run that has failed already says why itself."""
            if hasattr(self, "watch") and not self.watch.is_broken:
                self.watch.drain()

        def _name(self, which: int) -> int:
            live = list(self.watch.tokens)
            return live[which % len(live)]

    return AllocatorMachine
