"""What the compilers make of the Triton kernels without a GPU: no spills, wide loads, matrix products, two buffers.

The table is printed. With --soak every variant is compiled, otherwise those that differ most. What Triton compiled stays in
`target/triton`, found again by its sources, options and versions, for as long as none of them changes.
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.kernels.implementations import SOURCES

pytest.importorskip("triton", reason="Triton is not installed")
from tests.kernels.compiled import MORE, VARIANTS

ALL = [*VARIANTS, *MORE]
pytestmark = pytest.mark.timeout(3600)

SHARED = {"sm_80": 163 << 10, "sm_90": 227 << 10, "sm_100": 227 << 10, "gfx942": 64 << 10}
"""Bytes of shared memory that a launch may ask for."""
EXEMPT = {
    # (property, kind, dtype, target or "" for all): why
    ("products", "decode", "float32", ""): "float32 is multiplied exactly (input_precision ieee)",
    ("products", "prefill", "float32", ""): "float32 is multiplied exactly (input_precision ieee)",
    ("buffers", "decode", "float32", ""): "two stages: the rows are twice as wide, and one buffer fits",
    ("products", "split", "float32", ""): "float32 is multiplied exactly (input_precision ieee)",
    ("products", "cascade", "float32", ""): "float32 is multiplied exactly (input_precision ieee)",
    ("buffers", "split", "float32", ""): "two stages: the rows are twice as wide, and one buffer fits",
    ("buffers", "cascade", "float32", ""): "two stages: the rows are twice as wide, and one buffer fits",
    ("buffers", "cascade", "bfloat16", "sm_80"): "head size 256 has two stages there: more spills",
    ("buffers", "prefill", "float32", ""): "two stages: the rows are twice as wide, and one buffer fits",
    ("buffers", "prefill", "float16", "sm_80"): "head size 256 has two stages there: more spills",
}


ROOT = Path(__file__).resolve().parents[2]


def compiled(*options: str) -> list[dict[str, Any]]:
    """The rows of `compiled.py`, run where Triton does not interpret."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(ROOT / "target" / "triton"), "TRITON_DEFAULT_FP_FUSION": "1"}
    command = [sys.executable, "-m", "tests.kernels.compiled", *options]
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    print(done.stdout)
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.fixture(scope="module")
def table(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    """The variants that differ most; with --soak all of them, which `make aot` keeps."""
    rows = compiled(*(["--all"] if request.config.getoption("--soak") else []))
    if kept := os.environ.get("BLOCKTABLE_KEEP_AOT"):
        Path(kept).write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")
    return rows


def failures(table: list[dict[str, Any]]) -> list[str]:
    """Rows that break a gate and are not exempt, with the gate."""
    found = []
    for row in table:
        name = f"{row['kind']} {row['dtype']} {row['width']} on {row['target']}"
        for gate, holds in _gates(row).items():
            keys = [(gate, row["kind"], row["dtype"], target) for target in ("", row["target"])]
            if not holds and not any(key in EXEMPT for key in keys):
                found.append(f"{name}: {gate}: {row}")
    return found


def _gates(row: dict[str, Any]) -> dict[str, bool]:
    if row["kind"].endswith("fp8") and row["target"] == "sm_80":
        return {"refused": "fp8e4nv not supported" in row.get("refused", "")}
    if "refused" in row:
        return {"compiles": False}
    attends = row["kind"].startswith(("decode", "prefill", "split", "cascade", "rest"))
    is_amd = row["target"].startswith("gfx")
    gates = {
        "spills": row["vgpr_spill_count" if is_amd else "spills"] == 0,
        "shared": row["shared"] <= SHARED[row["target"]],
        "loads": row["loads_16_bytes"] > 0 and row.get("loads_2_bytes", 0) == 0,
    }
    if attends:
        gates["products"] = bool(row["products"])
    if row["kind"] in ("split", "rest") and not is_amd:
        gates["atomics"] = any("gpu" in one and "acq_rel" in one for one in row["atomics"])
    if attends and not is_amd:
        gates["buffers"] = len(row["buffers"]) >= 2 and min(row["buffers"]) >= 2
    return gates


def kept() -> list[dict[str, Any]]:
    """The table of all variants, as `make aot` left it."""
    lines = (Path(__file__).parent / "compiled.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


def test_the_kept_table_is_whole_and_passes_the_gates() -> None:
    """Every variant on every target; what this version's tests do not compile again is told by the table."""
    found = [(row["kind"], row["dtype"], row["width"], row["target"]) for row in kept()]
    assert sorted(found) == sorted((*variant, target) for variant in ALL for target in SHARED)
    assert failures(kept()) == []


@pytest.mark.parametrize("exemption", EXEMPT, ids=str)
def test_every_exemption_is_needed(exemption: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    rows = kept()
    assert failures(rows) == []
    monkeypatch.delitem(EXEMPT, exemption)
    assert failures(rows) != []


def test_the_compiled_kernels_pass_their_gates(table: list[dict[str, Any]]) -> None:
    assert {row["target"] for row in table} == set(SHARED)
    assert failures(table) == []


@pytest.mark.parametrize(
    ("target", "kind", "change"),
    [
        ("sm_90", "decode", {"spills": 8}),
        ("gfx942", "decode", {"vgpr_spill_count": 1}),
        ("sm_90", "decode", {"shared": 240_000}),
        ("sm_90", "store", {"loads_2_bytes": 4}),
        ("gfx942", "copy", {"loads_16_bytes": 0}),
        ("sm_90", "prefill", {"products": []}),
        ("sm_100", "decode", {"buffers": [1, 1]}),
        ("sm_90", "split", {"atomics": ["atom.global.gpu.relaxed.add.u32"]}),
        ("sm_80", "decode-fp8", {"refused": ""}),
        ("sm_90", "decode-fp8", {"refused": "it does not compile"}),
    ],
)
def test_a_gate_that_is_broken_is_told(table: list[dict[str, Any]], target: str, kind: str, change: dict[str, Any]) -> None:
    (row,) = [row for row in table if row["target"] == target and row["kind"] == kind][:1]
    assert len(failures([row | change])) == 1


ONCE = {
    "prefill": ["_attend", "_store"],
    "split": ["_decode", "_store"],
    # Its first step has one sequence, and so no prefix to share.
    "cascade": ["_attend_prefixes", "_decode", "_decode", "_store"],
}


def test_nothing_that_changes_from_step_to_step_makes_a_variant() -> None:
    """Numbers of sequences and tokens, lengths, columns of the tables: one variant of each kernel serves all steps."""
    made = {row["variants_of"]: row["made"] for row in compiled("--variants")}
    assert made == ONCE


def test_a_number_that_specialises_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: with the tables' width among the numbers that Triton looks at, a decode has several variants."""
    text = (SOURCES / "triton_decode.py").read_text(encoding="utf-8")
    assert text.count(', "table_row"]') == 1
    package = tmp_path / "blocktable"
    shutil.copytree(SOURCES.parent, package, ignore=shutil.ignore_patterns("__pycache__"))
    (package / "kernels" / "triton_decode.py").write_text(text.replace(', "table_row"]', "]"), encoding="utf-8")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    made = {row["variants_of"]: row["made"] for row in compiled("--variants")}
    assert made["split"].count("_decode") > 1
    assert made["prefill"] == ONCE["prefill"]
