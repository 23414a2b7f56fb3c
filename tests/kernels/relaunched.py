"""Launches what is bound for a GPU that is not there: `python -m tests.kernels.relaunched`. A line of JSON for each kind.

Before: `test_bound_launch.py` starts it in a process of its own, where Triton does not interpret. After: it is told whether
each call hands the driver the same. Always: Triton compiles, loads and launches as it does on a GPU; only the driver, where
that ends, writes down what it is handed instead.
"""

import json
from typing import Any

import torch
import triton
from torch import Tensor

from blocktable.kernels import AttentionBatch, triton_attention, triton_cascade, triton_decode
from blocktable.kernels.bound_launch import BoundLaunch
from tests.kernels.compiled import Driver

TARGET = "sm_90"


class Written(Driver):
    """A driver of a device on which nothing runs."""

    def __init__(self) -> None:
        super().__init__(TARGET)
        self.utils = self
        self.launches: list[tuple[str, tuple[Any, ...]]] = []

    def get_device_properties(self, _device: int) -> dict[str, int]:
        """As much as a launch asks."""
        return {"max_shared_mem": 227 << 10}

    def load_binary(self, name: str, *_rest: Any) -> tuple[Any, ...]:
        """Module, function, registers, spills, most threads."""
        return name, name, 0, 0, 1024

    def unload_module(self, _module: Any) -> None:
        """Nothing was loaded."""

    def launcher_cls(self, _source: Any, _metadata: Any) -> Any:
        """Takes three sizes, a stream, the function, two records and two hooks, and the kernel's arguments."""

        def launch(*given: Any) -> None:
            self.launches.append((given[4], (*given[:4], *given[9:])))

        return launch


def bound(kind: str) -> BoundLaunch:
    """The launches of one kind, over bfloat16 rows of 128."""
    caches = [torch.zeros(9, 2, 16, 128, dtype=torch.bfloat16) for _ in range(2)]
    tables = torch.ones(2, 4, dtype=torch.int32)
    counts = 3 if kind == "prefill" else 1
    batch = AttentionBatch.build(tables, torch.tensor([0, counts, 2 * counts]), torch.tensor([50, 40]), 16)
    q = torch.zeros(2 * counts, 8, 128, dtype=torch.bfloat16)
    if kind == "cascade":
        return triton_cascade.bind_cascade(q, *caches, batch.with_prefixes([0, 1], [0, 2], [2]), scale=0.1, target=TARGET)
    bind = triton_attention.bind_attention if kind == "prefill" else triton_decode.bind_decode
    return bind(q, *caches, batch, scale=0.1, target=TARGET)


def told(driver: Written, kind: str) -> dict[str, Any]:
    """What the driver is handed at the first call, and at two more."""
    launches = bound(kind)
    calls = []
    for _ in range(3):
        driver.launches.clear()
        launches()
        calls.append([(name, tuple(map(_named, given))) for name, given in driver.launches])
    counts = [len(given) - 4 for _, given in calls[0]]
    wanted = [len(launch.kernel.arg_names) for launch in launches.launches]
    return {
        "kind": kind,
        "kernels": [name for name, _ in calls[0]],
        "whole": counts == wanted,
        "same": calls[0] == calls[1] == calls[2],
    }


def _named(given: Any) -> Any:
    return ("tensor", given.data_ptr(), str(given.dtype)) if isinstance(given, Tensor) else given


if __name__ == "__main__":
    written = Written()
    triton.runtime.driver.set_active(written)
    for kind in ("prefill", "split", "cascade"):
        print(json.dumps(told(written, kind)), flush=True)
