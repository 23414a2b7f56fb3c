"""Owns the faults that tests plant in a running engine: a model that raises or waits, logits that are no numbers, interrupts.

Before: a test names the call at which it happens. After: the engine meets it as it would meet the real one.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from blocktable import LLM, AsyncLLM


def loop_of(llm: LLM | AsyncLLM) -> Any:
    """The engine's step loop: where faults are planted."""
    assert llm._engine is not None
    return llm._engine.loop


Fault = Callable[[Any, Callable[[], torch.Tensor]], torch.Tensor]
"""What happens in place of a forward pass: it gets the plan, and the real pass to call or not."""


class FaultyRunner:
    """Runs the real model, but at the calls in `at` (counted from 0; None = at every one) `fault` in its place."""

    def __init__(self, real: Any, fault: Fault, at: set[int] | None = None) -> None:
        self.real = real
        self.fault = fault
        self.at = at
        self.calls = 0

    def forward(self, plan: Any, *token_ids: Any) -> torch.Tensor:
        call, self.calls = self.calls, self.calls + 1
        if self.at is None or call in self.at:
            return self.fault(plan, lambda: self.real.forward(plan, *token_ids))
        return self.real.forward(plan, *token_ids)


@contextmanager
def faulty_model(llm: LLM | AsyncLLM, fault: Fault, at: set[int] | None = None) -> Iterator[FaultyRunner]:
    """The engine's model with a fault at the calls `at`, or at every one."""
    loop = loop_of(llm)
    real = loop._runner
    loop._runner = FaultyRunner(real, fault, at)
    try:
        yield loop._runner
    finally:
        loop._runner = real


def raising(error: BaseException, *, is_late: bool = False) -> Fault:
    """A model that raises before it has written anything, or, if `is_late`, after it has written all its keys and values."""

    def fault(plan: Any, forward: Callable[[], torch.Tensor]) -> torch.Tensor:
        if is_late:
            forward()
        raise error

    return fault


def changing(change: Callable[[Any, torch.Tensor], None]) -> Fault:
    """A model whose logits are changed in place; `change` gets the plan and the logits."""

    def fault(plan: Any, forward: Callable[[], torch.Tensor]) -> torch.Tensor:
        logits = forward()
        change(plan, logits)
        return logits

    return fault


class Turnstile:
    """A model that waits before each pass until it is let through; afterwards it is the real one.

    Always: between `let_in` and the next `let_through` exactly one step is under way, in the middle of the model.
    """

    PATIENCE_S = 60.0

    def __init__(self) -> None:
        self.plans: list[list[int]] = []  # the requests of each pass that has come
        self._came = threading.Semaphore(0)
        self._may_go = threading.Semaphore(0)
        self._is_open = False

    def __call__(self, plan: Any, forward: Callable[[], torch.Tensor]) -> torch.Tensor:
        self.plans.append(sorted(plan.seq_slots.tolist()))
        self._came.release()
        if not self._is_open and not self._may_go.acquire(timeout=self.PATIENCE_S):
            raise TimeoutError("nobody let the model through")
        return forward()

    def let_in(self) -> None:
        """Wait until the model is in a pass."""
        if not self._came.acquire(timeout=self.PATIENCE_S):
            raise TimeoutError("no step came")

    def let_through(self) -> None:
        """Let this pass go on."""
        self._may_go.release()

    def open(self) -> None:
        """Let everybody through from now on."""
        self._is_open = True
        self._may_go.release()


@contextmanager
def turnstile(llm: LLM | AsyncLLM) -> Iterator[Turnstile]:
    """The engine's model behind a turnstile, which is open in the end."""
    stile = Turnstile()
    with faulty_model(llm, stile):
        try:
            yield stile
        finally:
            stile.open()


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
def interrupted_after(llm: LLM | AsyncLLM, name: str, at: int, error: BaseException | None = None) -> Iterator[None]:
    """An interrupt, or `error`, falls between the return of the scheduler's method and what its caller does with the result."""
    loop = loop_of(llm)
    real = loop.scheduler

    def use(scheduler: Any) -> None:
        loop.scheduler = loop._roster._scheduler = loop._hand_out._scheduler = scheduler

    use(Scheduler(real, name, at, KeyboardInterrupt() if error is None else error))
    try:
        yield
    finally:
        use(real)
