"""CPU time of processes, as Linux tells it.

Before: `serve.py` knows the number of a server's process. After: seconds that it and its children computed. Always: nothing
is asked of the process itself.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

TICKS = os.sysconf("SC_CLK_TCK") if hasattr(os, "sysconf") else 100


@dataclass(frozen=True, slots=True)
class ServerCpu:
    """Seconds so far of a server's first process, which speaks HTTP, and of those that it started, which run the model."""

    front_s: float
    engine_s: float

    def __sub__(self, before: ServerCpu) -> ServerCpu:
        return ServerCpu(self.front_s - before.front_s, self.engine_s - before.engine_s)


def cpu_of(process_id: int) -> ServerCpu:
    """Of that process and all below it. Raises `OSError` where the system does not tell."""
    below: dict[int, list[int]] = {}
    seconds: dict[int, float] = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdecimal():
            continue
        try:
            # The name of the program may hold anything; what follows it does not.
            fields = (entry / "stat").read_text().rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            continue
        below.setdefault(int(fields[1]), []).append(int(entry.name))
        seconds[int(entry.name)] = (int(fields[11]) + int(fields[12])) / TICKS
    found, left = 0.0, list(below.get(process_id, ()))
    while left:
        child = left.pop()
        found += seconds[child]
        left += below.get(child, ())
    return ServerCpu(seconds[process_id], found)
