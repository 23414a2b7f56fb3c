"""Promise: threads of the model that wait for each other sleep soon, so that a core stays free for whoever else wants it; what
the user says in the environment stands."""

import os
import subprocess
import sys
from collections.abc import Mapping

import pytest

from blocktable import openmp
from blocktable.engine.cpu_budget import usable_cpus

REGIONS = 20

SCRIPT = f"""
import os, time
os.environ.update(%r)
from blocktable import openmp
openmp.WAIT.update(%r)
before = dict(os.environ)
openmp.load_torch()
assert dict(os.environ) == before, "the environment is another"
import torch
torch.set_num_threads(2)
numbers = torch.ones(1 << 18)
numbers.exp_()
used = time.process_time()
for _ in range({REGIONS}):
    numbers.exp_()
    time.sleep(0.02)
print(time.process_time() - used)
"""


def cpu_s(said: Mapping[str, str], wait: Mapping[str, str] = openmp.WAIT) -> float:
    """CPU seconds of a process that runs a parallel region now and then and sleeps in between."""
    clean = {name: value for name, value in os.environ.items() if name not in (*openmp.SAID, "OMP_NUM_THREADS")}
    line = [sys.executable, "-c", SCRIPT % (dict(said), dict(wait))]
    return float(subprocess.run(line, env=clean, capture_output=True, text=True, check=True).stdout)


@pytest.mark.skipif(sys.platform != "linux" or usable_cpus() < 2, reason="needs GNU's runtime and two CPUs")
def test_threads_that_wait_sleep_soon() -> None:
    """Two planted ways to spin on: the runtime's own, and that of a user, who is not overruled."""
    ours = cpu_s({})
    assert ours < cpu_s({}, {"GOMP_SPINCOUNT": "300000"}) / 2
    assert ours < cpu_s({"GOMP_SPINCOUNT": "300000"}) / 2


@pytest.mark.parametrize("said", [{"OMP_WAIT_POLICY": "ACTIVE"}, {"GOMP_SPINCOUNT": "7"}])
def test_what_the_user_says_stands(said: dict[str, str]) -> None:
    assert openmp.waiting(said) == {}
    assert openmp.waiting({}) == openmp.WAIT
