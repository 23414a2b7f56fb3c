"""Promise: threads are counted by the CPUs that affinity and control groups leave to the process, whatever the machine has."""

import os
from pathlib import Path

import pytest
import torch

from blocktable.engine.cpu_budget import usable_cpus

from .conftest import MakeLLM


@pytest.fixture
def many_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """An affinity of 64 CPUs."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(64)), raising=False)


def groups(top: Path, membership: str, files: dict[str, str]) -> int:
    """CPUs where these are the groups: files below the hierarchy, and what /proc/self/cgroup says."""
    for name, text in files.items():
        path = top / "hierarchy" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    (top / "membership").write_text(membership)
    return usable_cpus(membership=top / "membership", hierarchy=top / "hierarchy")


CASES = {
    "no quota": ("0::/a/b\n", {"a/b/cpu.max": "max 100000\n", "a/cpu.max": "max 100000\n"}, 64),
    "a quota of its own": ("0::/a/b\n", {"a/b/cpu.max": "400000 100000\n"}, 4),
    "a tighter one around it": ("0::/a/b\n", {"a/b/cpu.max": "800000 100000\n", "a/cpu.max": "300000 100000\n"}, 3),
    "a part of a CPU is none": ("0::/a\n", {"a/cpu.max": "250000 100000\n"}, 2),
    "less than one is one": ("0::/a\n", {"a/cpu.max": "50000 100000\n"}, 1),
    "a container that sees its own group only": ("0::/../../far/away\n", {"cpu.max": "500000 100000\n"}, 5),
    "version 1": (
        "4:cpu,cpuacct:/c\n1:name=systemd:/\n",
        {"cpu/c/cpu.cfs_quota_us": "700000\n", "cpu/c/cpu.cfs_period_us": "100000\n"},
        7,
    ),
    "version 1 without a quota": ("4:cpu:/c\n", {"cpu/c/cpu.cfs_quota_us": "-1\n", "cpu/c/cpu.cfs_period_us": "100000\n"}, 64),
    "nothing there": ("0::/\n", {}, 64),
    "nonsense": ("0::/\n", {"cpu.max": "lots of\n"}, 64),
}


@pytest.mark.parametrize("case", CASES)
def test_quotas(case: str, many_cpus: None, tmp_path: Path) -> None:
    membership, files, expected = CASES[case]
    assert groups(tmp_path, membership, files) == expected


def test_without_any_group(many_cpus: None, tmp_path: Path) -> None:
    assert usable_cpus(membership=tmp_path / "none", hierarchy=tmp_path / "none") == 64


def test_affinity(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {3, 7, 11}, raising=False)
    assert groups(tmp_path, "0::/\n", {"cpu.max": "800000 100000\n"}) == 3
    monkeypatch.setattr(os, "cpu_count", lambda: 1000)
    assert groups(tmp_path, "0::/\n", {"cpu.max": "800000 100000\n"}) == 3, "what the machine has does not count"


def test_the_model_gets_no_more_threads(make_llm: MakeLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fewer than it may have are left as they are, and so is what the caller says."""
    monkeypatch.setattr("blocktable.engine.build.usable_cpus", lambda: 2)
    for before, option, after in ((5, None, 2), (1, None, 1), (1, 3, 3), (5, 4, 4)):
        torch.set_num_threads(before)
        make_llm(num_threads=option)
        assert torch.get_num_threads() == after
