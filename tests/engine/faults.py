"""Owns the faults that tests plant in a running engine: a model that raises, logits that are no numbers, interrupts.

Before: a test names the call at which it happens. After: the engine meets it as it would meet the real one.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from blocktable import LLM


def loop_of(llm: LLM) -> Any:
    """The engine's step loop: where faults are planted."""
    assert llm._engine is not None
    return llm._engine.loop


class FaultyRunner:
    """Runs the real model; at the calls in `at` (counted from 0), and at no other, it does `fault` in its place or after it."""

    def __init__(self, real: Any, fault: Callable[[Any, torch.Tensor], torch.Tensor], at: set[int] | None = None) -> None:
        self.real = real
        self.fault = fault
        self.at = at
        self.calls = 0

    def forward(self, plan: Any) -> torch.Tensor:
        call, self.calls = self.calls, self.calls + 1
        logits = self.real.forward(plan)
        if self.at is None or call in self.at:
            logits = self.fault(plan, logits)
        return logits


@contextmanager
def faulty_model(llm: LLM, fault: Callable[[Any, torch.Tensor], torch.Tensor], at: set[int] | None = None) -> Iterator[FaultyRunner]:
    """The engine's model with a fault at the calls `at`, or at every one."""
    loop = loop_of(llm)
    real = loop._runner
    loop._runner = FaultyRunner(real, fault, at)
    try:
        yield loop._runner
    finally:
        loop._runner = real


def raising(error: BaseException) -> Callable[[Any, torch.Tensor], torch.Tensor]:
    """A model that raises, after it has written its keys and values."""

    def fault(plan: Any, logits: torch.Tensor) -> torch.Tensor:
        raise error

    return fault


class Scheduler:
    """The real scheduler, but that method `name` raises `error` right after its `at`-th call has done its work, once."""

    def __init__(self, real: Any, name: str, at: int, error: BaseException) -> None:
        self._real, self._name, self._left, self._error = real, name, at, error

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._real, name)
        if name != self._name:
            return method

        def call(*args: Any, **options: Any) -> Any:
            result = method(*args, **options)
            self._left -= 1
            if self._left == -1:
                raise self._error
            return result

        return call


@contextmanager
def interrupted_after(llm: LLM, name: str, at: int) -> Iterator[None]:
    """An interrupt falls between the return of the scheduler's method and whatever its caller does with the result."""
    loop = loop_of(llm)
    real = loop.scheduler
    loop.scheduler = Scheduler(real, name, at, KeyboardInterrupt())
    try:
        yield
    finally:
        loop.scheduler = real
