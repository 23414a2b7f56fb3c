"""How much memory of this machine a process may still take.

Before: `kv_sizing` asks for a share of it. After: a number of bytes. Always: a container's limit counts like the machine's own:
the answer is the lowest of what the machine has left and what every control group above the process has left.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

PROC = Path("/proc")
CGROUPS = Path("/sys/fs/cgroup")


def available_host_bytes(proc: Path = PROC, cgroups: Path = CGROUPS) -> int | None:
    """Bytes that can still be taken without swapping; None where this system does not say."""
    machine = _machine_available(proc)
    left = [] if machine is None else [machine]
    left += list(_groups_available(proc, cgroups))
    return min(left, default=None)


def _machine_available(proc: Path) -> int | None:
    """What the kernel estimates can be taken: free pages, and caches that it would give up."""
    try:
        for line in (proc / "meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    if find_spec("psutil") is None:  # macOS and Windows have no /proc; accelerate, in the extra `engine`, brings psutil
        return None
    return int(import_module("psutil").virtual_memory().available)


def _groups_available(proc: Path, cgroups: Path) -> Iterator[int]:
    """What each control group that holds this process and has a limit has left; versions 1 and 2."""
    for folder, limit_name, used_name in _group_folders(proc, cgroups):
        limit, used = _number(folder / limit_name), _number(folder / used_name)
        if limit is not None and used is not None:
            # Cached file pages count as used, but are given up before the limit is felt.
            yield max(0, limit - max(0, used - _inactive_file(folder)))


def _group_folders(proc: Path, cgroups: Path) -> Iterator[tuple[Path, str, str]]:
    try:
        lines = (proc / "self" / "cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        parts = [part for part in path.split("/") if part and part != ".."]
        # A container may see its own group as the root of the tree, whatever the path says: every level is tried.
        for depth in range(len(parts) + 1):
            if not controllers:
                yield cgroups.joinpath(*parts[:depth]), "memory.max", "memory.current"
            elif "memory" in controllers.split(","):
                yield cgroups.joinpath("memory", *parts[:depth]), "memory.limit_in_bytes", "memory.usage_in_bytes"


def _number(path: Path) -> int | None:
    """The number in a file; None where there is no file, or it says `max`."""
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None


def _inactive_file(folder: Path) -> int:
    try:
        lines = (folder / "memory.stat").read_text().splitlines()
    except OSError:
        return 0
    found = {key: int(value) for key, _, value in (line.partition(" ") for line in lines) if value.strip().isdigit()}
    return found.get("total_inactive_file", found.get("inactive_file", 0))
