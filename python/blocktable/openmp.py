"""How torch's OpenMP threads wait for each other: by spinning for less than a millisecond, then asleep.

Before: somebody needs torch. After: it is loaded, unless it was. Always: what the user says in the environment stands, and the
environment is afterwards as it was.

A step runs a hundred parallel regions and more, and at the end of each its threads wait for the last one. GNU's runtime has
them spin for 300,000 rounds, about 10 ms: nothing where every thread has a core, but where other processes want the cores too
a thread that spins keeps the very one from running that it waits for. The runtime reads its settings once, when it is loaded.
"""

import os
import sys
from collections.abc import Mapping

WAIT = {"GOMP_SPINCOUNT": "20000"}
"""Some 0.7 ms: what Python does between two regions fits in, so the next one finds its threads awake. With 1,000 a batch of
32 lost a tenth and a single request a sixth; beside four busy processes 20,000 cost a fifth. Only GNU's runtime knows the
name."""

SAID = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")
"""Any of these in the environment, and the user has decided."""


def waiting(environment: Mapping[str, str]) -> dict[str, str]:
    """What to add to the environment of a process that will load torch."""
    return {} if any(name in environment for name in SAID) else dict(WAIT)


def load_torch() -> None:
    """Import torch so that its threads wait thus. One that is loaded already stays as it is. Raises `ImportError`."""
    if "torch" in sys.modules:
        return
    added = waiting(os.environ)
    os.environ.update(added)
    try:
        import torch  # noqa: F401 - for what it does
    finally:
        for name in added:
            os.environ.pop(name, None)
