"""How many CPUs this process may use: by its affinity, and by the quotas of its control groups; never by what the machine has.

Before: the operating system. After: `build.py` sizes the model's threads, `async_llm.py` those that read prompts.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

MEMBERSHIP = Path("/proc/self/cgroup")
HIERARCHY = Path("/sys/fs/cgroup")


def usable_cpus(*, membership: Path = MEMBERSHIP, hierarchy: Path = HIERARCHY) -> int:
    """CPUs that this process can keep busy, at least 1.

    The affinity holds what cpusets and `taskset` leave. A quota of 2.5 CPUs counts as 2: three threads would be stopped in the
    middle of every period. Of nested groups the tightest counts. Read anew at each call. `membership` and `hierarchy` are
    where Linux tells groups (both versions); where there is no such file there is no quota.
    """
    has_affinity = hasattr(os, "sched_getaffinity")
    cpus = len(os.sched_getaffinity(0)) if has_affinity else os.cpu_count() or 1
    return max(1, min([cpus, *(int(quota) for quota in _quotas(membership, hierarchy))]))


def _quotas(membership: Path, hierarchy: Path) -> Iterator[float]:
    """CPUs that each group around this process allows."""
    for line in _text(membership).splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            yield from _quotas_of_path(hierarchy, path)
        elif "cpu" in controllers.split(","):
            yield from _quotas_of_path(hierarchy / controllers, path)
            yield from _quotas_of_path(hierarchy / "cpu", path)


def _quotas_of_path(top: Path, path: str) -> Iterator[float]:
    """The quotas of a group and those around it. Inside a container the path may be the host's, which is not there: then the
    top is the container's own group."""
    names = [name for name in path.split("/") if name not in ("", "..")]
    for depth in range(len(names) + 1):
        group = top.joinpath(*names[:depth])
        yield from _one_quota(_text(group / "cpu.max").split())
        yield from _one_quota([_text(group / "cpu.cfs_quota_us").strip(), _text(group / "cpu.cfs_period_us").strip()])


def _one_quota(fields: list[str]) -> Iterator[float]:
    """CPUs of (quota, period) in microseconds; `max` and -1 are no quota."""
    if len(fields) == 2 and fields[0].isdecimal() and fields[1].isdecimal() and int(fields[1]) > 0:
        yield int(fields[0]) / int(fields[1])


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
