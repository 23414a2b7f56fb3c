"""No Triton kernel touches memory before or behind its tensors: their ends lie at pages that nobody may touch."""

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton", reason="Triton is not installed")
pytestmark = [
    pytest.mark.timeout(600),
    pytest.mark.skipif(sys.platform != "linux", reason="protects pages as Linux does"),
]


@pytest.fixture(scope="module")
def runs() -> list[dict[str, Any]]:
    """What `guarded.py` tells, in a process of its own."""
    command = [sys.executable, "-m", "tests.kernels.guarded"]
    done = subprocess.run(command, cwd=Path(__file__).resolve().parents[2], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    print(done.stdout)
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_no_kernel_touches_what_lies_before_or_behind_its_tensors(runs: list[dict[str, Any]]) -> None:
    statuses = {run["run"]: run["status"] for run in runs if run["fault"] is None}
    assert {"attention", "quantised", "decode", "cascade", "store", "store_quantised", "rope", "blocks"} <= statuses.keys()
    assert all(status == [0, 0] for status in statuses.values()), statuses


def test_every_planted_access_out_of_bounds_ends_its_process(runs: list[dict[str, Any]]) -> None:
    ended = {run["fault"]: run["status"] for run in runs if run["fault"] is not None}
    assert len(ended) >= 15
    assert all(-signal.SIGSEGV in status and 1 not in status for status in ended.values()), ended


def test_every_kernel_has_a_planted_access(runs: list[dict[str, Any]]) -> None:
    assert {run["run"] for run in runs if run["fault"] is not None} == {run["run"] for run in runs if run["fault"] is None}
