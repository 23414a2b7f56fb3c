"""How many files a process may have open: as many as the system allows it.

Before: shells and unit files begin with 1,024, whatever they allow. After: each connection of a server, or of a benchmark's
clients, is a file, and the hard limit alone bounds them.
"""

from __future__ import annotations

from importlib.util import find_spec


def open_as_many_as_allowed() -> None:
    """Raise the soft limit of this process, and of its children, to the hard one. Where there are no limits it does nothing."""
    if find_spec("resource") is None:
        return
    import resource

    wanted, allowed = resource.getrlimit(resource.RLIMIT_NOFILE)
    if wanted != allowed:
        resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, allowed))
