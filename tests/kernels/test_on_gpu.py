"""The one command for a GPU: run whole where there is one, and gone through in Triton's interpreter where there is none."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

ROOT = Path(__file__).resolve().parents[2]
NAMES = ("attention", "decode_race", "captured", "cascades", "stores", "moves", "engine")


def on_gpu(*options: str, interpreted: bool, tree: Path = ROOT) -> subprocess.CompletedProcess[str]:
    """In a process of its own: in this one Triton interprets."""
    environment = os.environ | {"TRITON_INTERPRET": "1" if interpreted else "0"}
    command = [sys.executable, "-W", "ignore", "-m", "tests.kernels.on_gpu", *options]
    return subprocess.run(command, env=environment, cwd=tree, capture_output=True, text=True)


@pytest.mark.gpu
@pytest.mark.timeout(1800)
def test_the_kernels_are_right_on_a_gpu(tmp_path: Path) -> None:
    done = on_gpu("--report", str(tmp_path / "report.md"), interpreted=False)
    assert done.returncode == 0, done.stdout + done.stderr
    print(done.stdout)


def test_the_command_goes_through_everything_and_keeps_a_report(tmp_path: Path) -> None:
    report = tmp_path / "report.md"
    done = on_gpu("--device", "cpu", "--smoke", "--report", str(report), interpreted=True)
    assert done.returncode == 0, done.stdout + done.stderr
    text = report.read_text(encoding="utf-8")
    assert all(f"- right: {name}: " in text for name in NAMES)
    assert all(f'"what": "{what}"' in text for what in ("decode", "store", "copy"))
    assert f"torch {torch.__version__}" in text
    assert "WRONG" not in text


def test_a_wrong_answer_ends_it_and_stands_in_the_report(tmp_path: Path) -> None:
    """With a twin that rounds the wrong way, the stores are told."""
    (tmp_path / "sitecustomize.py").write_text(
        "import blocktable.kernels.quantised as twin\n"
        "own = twin.quantise\n"
        "twin.quantise = lambda rows, dtype: (own(rows, dtype)[0], own(rows, dtype)[1] * 1.5)\n",
        encoding="utf-8",
    )
    report = tmp_path / "report.md"
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = str(tmp_path)
    try:
        done = on_gpu("--device", "cpu", "--smoke", "--report", str(report), interpreted=True)
    finally:
        os.environ.pop("PYTHONPATH") if before is None else os.environ.update(PYTHONPATH=before)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "WRONG: torch.int8: " in report.read_text(encoding="utf-8")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_the_command_says_so() -> None:
    done = on_gpu(interpreted=False)
    assert done.returncode == 2
    assert done.stderr == "there is no GPU that torch can use\n"
