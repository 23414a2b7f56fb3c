"""Launches whose arguments were checked and prepared once, to be run as often as wanted over the same memory.

Before: a `bind_` function of a kernel's file. After: each call launches, with what the tensors hold then; a CUDA graph may
capture it. Always: a call checks nothing, allocates nothing and reads nothing back; the tensors must stay where they are.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

Launcher = Callable[[Any, tuple[int, ...], tuple[Any, ...], dict[str, Any]], None]
"""Called with kernel, grid, arguments and constants in place of a launch: for compiling without a GPU."""


@dataclass(frozen=True, slots=True)
class KernelLaunch:
    """One launch of one kernel."""

    kernel: Any
    grid: tuple[int, ...]
    arguments: tuple[Any, ...]
    constants: dict[str, Any]

    def run(self, launch: Launcher | None = None) -> None:
        """Launch it, or hand it to `launch`."""
        if launch is not None:
            launch(self.kernel, self.grid, self.arguments, self.constants)
        else:
            self.kernel[self.grid](*self.arguments, **self.constants)


@dataclass(frozen=True, slots=True)
class BoundLaunch:
    """Launches one after the other, and the tensor that they fill."""

    out: Tensor
    launches: tuple[KernelLaunch, ...]

    def __call__(self, launch: Launcher | None = None) -> Tensor:
        """Fill `out` and return it."""
        for one in self.launches:
            one.run(launch)
        return self.out
