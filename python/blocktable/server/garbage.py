"""When a serving process looks for garbage: rarely, and never through what loading made.

Before: `serve_app.py` and `engine_process.py`, each in its own process, when all that stays has been made. After: Python's
collector. Always: what is garbage without a cycle in it goes at once, as ever; cycles are found, only later.
"""

from __future__ import annotations

import gc

FULL = 1000
"""Collections of the middle generation between two full ones. A full one takes 10 to 20 ms among the objects of a thousand
streams, and by Python's own number (10) one step in thirty had one."""


def settle_memory() -> None:
    """What there is stays: it is looked through by no collection any more."""
    gc.collect()
    gc.freeze()
    young, middle, _ = gc.get_threshold()
    gc.set_threshold(young, middle, FULL)
