"""The memory of a scheduler's pool is there when the scheduler is: no step waits for the system to find a page.

Linux tells a process's pages in /proc; elsewhere these tests are skipped.
"""

import subprocess
import sys
from pathlib import Path

import pytest

PAGES = """
import resource
from pathlib import Path
from blocktable import {maker}
def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
before = resident()
made = {call}
print(resident() - before)
"""

BLOCKS = 1_000_000
OF_A_BLOCK = 24 + 32 + 16 + 4
"""Bytes of a block's node, key, links and bucket at least."""


def _brought(maker: str, call: str) -> int:
    """Bytes that become resident while a new process makes something of `BLOCKS` blocks."""
    if not Path("/proc/self/statm").exists():
        pytest.skip("no /proc/self/statm here")
    program = PAGES.format(maker=maker, call=call)
    return int(subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout)


def test_a_scheduler_has_its_memory_from_the_start() -> None:
    made = f"Scheduler(num_blocks={BLOCKS}, block_size=16, max_model_len=1024, vocab_size=100)"
    assert _brought("Scheduler", made) >= BLOCKS * OF_A_BLOCK


def test_a_pool_that_is_made_for_a_moment_takes_what_it_uses() -> None:
    assert _brought("BlockPool", f"BlockPool({BLOCKS}, 16)") < BLOCKS * OF_A_BLOCK // 4
