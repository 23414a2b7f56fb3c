"""How long a device takes for something, and how fast it moves memory when it does nothing else.

Before: a benchmark has something to run on a CPU or a GPU. After: its figures. Always: a GPU is timed by its own events,
and sleeps before them while it is told what to do, so that what launches work is not counted; the plain speed is measured over
more bytes than any cache holds.
"""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch


SLEEP_CYCLES = 10_000_000
"""About 5 ms: longer than it takes to launch what is timed."""


class Clock(Protocol):
    """The clock of one device."""

    figure: str
    """What the share of the plain speed is called."""

    def seconds(self, run: Callable[[], object]) -> float:
        """How long `run` takes."""

    def plain_speed(self) -> float:
        """Bytes a second, measured now."""


class CpuClock:
    """Wall time, beside a plain sum over `num_bytes` bytes with torch's number of threads."""

    figure = "fraction_of_read"

    def __init__(self, num_bytes: int) -> None:
        import torch

        self._plain = torch.ones(num_bytes // 4)

    def seconds(self, run: Callable[[], object]) -> float:
        start = perf_counter()
        run()
        return perf_counter() - start

    def plain_speed(self) -> float:
        import torch
        from torch.utils.dlpack import to_dlpack  # type: ignore[attr-defined]

        from .. import _core

        threads = torch.get_num_threads()
        return self._plain.nbytes / self.seconds(lambda: _core.cpu_read_sum(to_dlpack(self._plain), threads=threads))


class GpuClock:
    """The GPU's events, beside a copy of `num_bytes` bytes, which reads and writes each."""

    figure = "fraction_of_copy"

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        import torch

        self._from = torch.ones(num_bytes, dtype=torch.uint8, device=device)
        self._to = torch.empty_like(self._from)

    def seconds(self, run: Callable[[], object]) -> float:
        import torch

        events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]  # type: ignore[no-untyped-call]
        torch.cuda._sleep(SLEEP_CYCLES)  # type: ignore[no-untyped-call]
        events[0].record()
        run()
        events[1].record()
        torch.cuda.synchronize(self._from.device)
        return float(events[0].elapsed_time(events[1])) / 1000

    def plain_speed(self) -> float:
        return 2 * self._from.nbytes / self.seconds(lambda: self._to.copy_(self._from))


def clock_of(device: torch.device, num_bytes: int) -> Clock:
    """The clock of a device."""
    return GpuClock(num_bytes, device) if device.type == "cuda" else CpuClock(num_bytes)
