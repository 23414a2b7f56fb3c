"""The one command for a GPU: run whole where there is one, and gone through in Triton's interpreter where there is none."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

ROOT = Path(__file__).resolve().parents[2]
NAMES = ("attention", "decode_race", "captured", "cascades", "stores", "ropes", "moves", "engine")

ROWS = {
    *(("decode", backend) for backend in ("triton", "flex", "varlen", "sdpa", "dense")),
    *(("prefill", backend) for backend in ("triton", "sdpa, dense")),
    *((f"decode, rows of torch.{name}", None) for name in ("float8_e4m3fn", "int8")),
    *((what, None) for what in ("store", "rope and store", "copy", "cascade", "host, a decode step")),
}
TARGETS = {"none", ">= 0.85 of copy", ">= 1.8", ">= 400 TFLOP/s", "<= 150 us"}


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


@pytest.mark.timeout(900)
def test_the_command_goes_through_everything_and_keeps_a_report(tmp_path: Path) -> None:
    report = tmp_path / "report.md"
    done = on_gpu("--device", "cpu", "--smoke", "--report", str(report), interpreted=True)
    assert done.returncode == 0, done.stdout + done.stderr
    text = report.read_text(encoding="utf-8")
    assert text == done.stdout
    assert all(f"- right: {name}: " in text for name in NAMES)
    rows = [json.loads(line[2:]) for line in text.splitlines() if line.startswith("- {")]
    assert {(row["what"], row.get("backend")) for row in rows} == ROWS
    assert all(
        row["verdict"] in ("met", "MISSED") if row["target"] != "none" else row["verdict"] == "for comparison" for row in rows
    )
    assert {row["target"] for row in rows} == TARGETS
    assert f"torch {torch.__version__}" in text
    assert "- 0 checks wrong, " in text


PLANTED = """
from blocktable.kernels import block_moves, quantised, rope
own = quantised.quantise
quantised.quantise = lambda rows, dtype: (own(rows, dtype)[0], own(rows, dtype)[1] * 1.5)
rope.rotated = lambda rows, cos, sin: rows
block_moves.copy_blocks = 1
"""
TOLD = {
    # A part, and what is told of it
    "stores": "WRONG: stores: torch.int8: ",
    "ropes": "WRONG: ropes: ",
    "moves": "FAILED: moves: ",
    "engine": "- right: engine: ",
    "one_byte": "WRONG: one_byte: rows of ",
    "shared_prefixes": '"what": "cascade"',
}


@pytest.mark.timeout(900)
def test_wrong_answers_and_what_fails_stand_in_the_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With twins that are wrong, or none. The parts behind them are gone through all the same."""
    (tmp_path / "sitecustomize.py").write_text(PLANTED, encoding="utf-8")
    report = tmp_path / "report.md"
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    done = on_gpu("--device", "cpu", "--smoke", "--only", *TOLD, "--report", str(report), interpreted=True)
    assert done.returncode == 1, done.stdout + done.stderr
    text = report.read_text(encoding="utf-8")
    assert [told for told in TOLD.values() if told not in text] == []
    assert "- 4 checks wrong, " in text


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_the_command_says_so() -> None:
    done = on_gpu(interpreted=False)
    assert done.returncode == 2
    assert done.stderr == "there is no GPU that torch can use\n"
