"""Bound launches: bound once, they give what a call gives, launch what was compiled, and ask nothing again."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from blocktable.kernels import AttentionBatch
from tests.kernels import checks
from tests.kernels.paged_case import Length, Shape, make_case

pytest.importorskip("triton", reason="Triton is not installed")
pytest.importorskip("tests.kernels.interpreter").mend()

from blocktable.kernels import triton_attention, triton_decode  # noqa: E402 - after the interpreter is chosen
from blocktable.kernels.bound_launch import BoundLaunch, KernelLaunch  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, of rows that are masked afterwards


@pytest.mark.parametrize("bind", [triton_attention.bind_attention, triton_decode.bind_decode])
def test_a_bound_launch_reads_what_its_tensors_hold_at_each_call(bind: Any) -> None:
    case = make_case(Shape(key_width=32, value_width=32), [Length(1, 20), Length(1, 33)])
    _, k_cache, v_cache = case.pool(float("nan"))
    batch = AttentionBatch.build(case.tables, case.query_starts, case.seq_lens, 16)
    bound = bind(case.q, k_cache, v_cache, batch, scale=case.options["scale"])
    first = bound()
    checks.assert_close(first, case.expected(), checks.TOLERANCE)
    case.q.neg_()
    again = bound()
    assert again.data_ptr() == first.data_ptr()
    checks.assert_close(again, case.expected(), checks.TOLERANCE)


class FakeKernel:
    """Stands for a compiled kernel: tells how it was launched."""

    arg_names = ("a_ptr", "count", "SIZE", "WIDE")

    def __init__(self) -> None:
        self.compiled = 0
        self.launched: list[tuple[Any, ...]] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def launch(*arguments: Any, **constants: Any) -> Any:
            self.compiled += 1
            self.launched.append((grid, arguments, constants))
            return FakeCompiled(self)

        return launch


class FakeCompiled:
    def __init__(self, kernel: FakeKernel) -> None:
        self.kernel = kernel

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return lambda *arguments: self.kernel.launched.append((grid, arguments))


def test_what_was_compiled_is_launched_directly_with_all_arguments_in_the_kernels_order() -> None:
    kernel, out = FakeKernel(), torch.zeros(1)
    launch = KernelLaunch(kernel, (3, 2), (out, 7), {"SIZE": 16, "WIDE": True, "num_warps": 4})
    bound = BoundLaunch(out, (launch,))
    for _ in range(3):
        assert bound() is out
    assert kernel.compiled == 1
    assert kernel.launched[0] == ((3, 2), (out, 7), {"SIZE": 16, "WIDE": True, "num_warps": 4})
    assert kernel.launched[1:] == [((3, 2, 1), (out, 7, 16, True))] * 2


def test_a_launch_that_is_handed_over_is_not_run() -> None:
    kernel = FakeKernel()
    handed: list[Any] = []
    KernelLaunch(kernel, (1,), (), {"SIZE": 1}).run(lambda *given: handed.append(given))
    assert handed == [(kernel, (1,), (), {"SIZE": 1})]
    assert kernel.launched == []


@pytest.mark.timeout(900)
def test_tritons_own_launcher_is_handed_the_same_again_without_a_look_at_the_arguments() -> None:
    """As on a GPU, but for a driver that writes down what it is handed; in a process where Triton does not interpret."""
    root = Path(__file__).resolve().parents[2]
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(root / "target" / "triton"), "TRITON_DEFAULT_FP_FUSION": "1"}
    command = [sys.executable, "-m", "tests.kernels.relaunched"]
    done = subprocess.run(command, env=environment, cwd=root, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    rows = {row["kind"]: row for row in map(json.loads, done.stdout.splitlines())}
    assert {kind: row["kernels"] for kind, row in rows.items()} == {
        "prefill": ["_attend"],
        "split": ["_decode"],
        "cascade": ["_attend_prefixes", "_decode"],
    }
    assert all(row["whole"] and row["same"] for row in rows.values()), rows
