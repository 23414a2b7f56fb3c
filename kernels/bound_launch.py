"""Launches whose arguments were checked and prepared once, to be run as often as wanted over the same memory.

Before: a `bind_` function of a kernel's file. After: each call launches, with what the tensors hold then; a CUDA graph may
capture it. Always: a call checks nothing, allocates nothing and reads nothing back; the tensors must stay where they are. From
the second call on, what the first one compiled is launched directly: how its arguments specialise is not asked again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

Launcher = Callable[[Any, tuple[int, ...], tuple[Any, ...], dict[str, Any]], Any]
"""Called with kernel, grid, arguments and constants in place of a launch: for compiling without a GPU."""


class KernelLaunch:
    """One launch of one kernel."""

    __slots__ = ("_again", "arguments", "constants", "grid", "kernel")

    def __init__(self, kernel: Any, grid: tuple[int, ...], arguments: tuple[Any, ...], constants: dict[str, Any]) -> None:
        self.kernel = kernel
        self.grid = grid
        self.arguments = arguments
        self.constants = constants
        self._again: Callable[[], Any] | None = None

    def run(self, launch: Launcher | None = None) -> None:
        """Launch it, or hand it to `launch`."""
        if launch is not None:
            launch(self.kernel, self.grid, self.arguments, self.constants)
        elif self._again is not None:
            self._again()
        else:
            self._keep(self.kernel[self.grid](*self.arguments, **self.constants))

    def _keep(self, compiled: Any) -> None:
        """What was compiled takes all arguments in the kernel's order, and three sizes. The interpreter compiles nothing."""
        if compiled is None:
            return
        names = self.kernel.arg_names
        values = dict(zip(names, self.arguments)) | self.constants
        launcher = compiled[(*self.grid, 1, 1)[:3]]
        ordered = [values[name] for name in names]
        self._again = lambda: launcher(*ordered)


class BoundLaunch:
    """Launches one after the other, and the tensor that they fill."""

    __slots__ = ("launches", "out")

    def __init__(self, out: Tensor, launches: tuple[KernelLaunch, ...]) -> None:
        self.out = out
        self.launches = launches

    def __call__(self, launch: Launcher | None = None) -> Tensor:
        """Fill `out` and return it."""
        for one in self.launches:
            one.run(launch)
        return self.out
