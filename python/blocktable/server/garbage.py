"""When a serving process looks for garbage: rarely, and never through what loading made.

Before: `serve_app.py` and `engine_process.py`, each in its own process, when all that stays has been made. After: Python's
collector. Always: what is garbage without a cycle in it goes at once, as ever; cycles are found, only later.
"""

from __future__ import annotations

import gc

YOUNG = 10_000
"""Objects that are made, and not let go of, between two collections of the youngest. With Python's own number (700) looking for
cycles, of which a request leaves few, took a tenth of a chat's CPU time in the server."""

FULL = 1000
"""Collections of the middle generation between two full ones. A full one takes 10 to 20 ms among the objects of a thousand
streams, and by Python's own number (10) one step in thirty had one."""


def settle_memory() -> None:
    """What there is stays: it is looked through by no collection any more."""
    gc.collect()
    gc.freeze()
    _, middle, _ = gc.get_threshold()
    gc.set_threshold(YOUNG, middle, FULL)
