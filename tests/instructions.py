"""Owns the instruction counts of the scheduler: counted under valgrind, and compared with those that the repository keeps.

Before: `make check`, or `make instructions`, which writes today's figures over the old ones. After: a line for each figure, and
an exit code of 0 unless one moved by more than `MOST_MOVED`, from a pool of 10,000 blocks to one of a million too, or retention
that nobody uses costs one instruction a step. A check that cannot be made here (no valgrind, another compiler) says so and is
counted.

A figure is the instructions of N steps more, divided by N and by the sequences (see `rust/core/bench/instructions.rs`), with
keys from a stub, since valgrind hides the processor's SHA and AVX-512.
"""

import json
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
KEPT = Path(__file__).with_suffix(".json")
BUILDS = ROOT / "target" / "instructions"
CASES = ("decode", "turnover")
SEQUENCES = 1024
STEPS = 64
SMALL, LARGE = 10_000, 1_000_000
"""Blocks of pools in which a step costs the same."""
FLAT_STEPS = 8
"""So few that the small pool evicts nothing in them, like the large one."""
MOST_MOVED = 0.02

Count = Callable[[str, str, int, int | None], int]
"""Instructions of (build, case, steps, blocks or None for as many as fit). Builds: "" and "no_retention"."""


def main() -> int:
    if missing := [tool for tool in ("valgrind", "cargo", "rustc") if shutil.which(tool) is None]:
        print(f"{' and '.join(missing)} not found: skipped {2 * len(CASES) + 1} comparisons of instruction counts")
        return 0
    for build in ("", "no_retention"):
        _build(build)
    if "--update" in sys.argv[1:]:
        kept = {"compiler": _compiler(), "cases": {case: round(per_step(count, "", case) / SEQUENCES, 1) for case in CASES}}
        KEPT.write_text(json.dumps(kept, indent=2) + "\n")
        print(f"{KEPT.relative_to(ROOT)}: {kept['cases']}")
        return 0
    return 0 if check(count, json.loads(KEPT.read_text()), _compiler()) else 1


def check(count: Count, kept: dict, compiler: str) -> bool:
    """Compare every case with what is kept, and with a build that has no retention."""
    good, skipped = True, 0
    for case in CASES:
        step, step_without = per_step(count, "", case), per_step(count, "no_retention", case)
        here, without = step / SEQUENCES, step_without / SEQUENCES
        expected = kept["cases"][case]
        if kept["compiler"] == compiler:
            good &= _compare(f"{case}: instructions per sequence per step", here, expected)
        else:
            print(f"{case}: {here:.1f}, kept {expected} of {kept['compiler']}, this is {compiler}: skipped")
            skipped += 1
        # What is not a whole instruction a step is the start of the process: its name and its memory have places of their own.
        is_equal = abs(step - step_without) < 1
        verdict = "" if is_equal else f": {step - step_without:+.0f} a step, must be equal"
        print(f"{case}: the same, retention unused: {here:.1f}, in a build without it {without:.1f}{verdict}")
        good &= is_equal
    small, large = (per_step(count, "", "turnover", FLAT_STEPS, blocks) / SEQUENCES for blocks in (SMALL, LARGE))
    good &= _compare(f"turnover in {LARGE:,} blocks", large, small, f"in {SMALL:,}")
    if skipped:
        print(f"skipped {skipped} comparisons of instruction counts")
    if not good:
        print("if the change is meant: `make instructions` keeps the new figures")
    return good


def _compare(what: str, here: float, other: float, of: str = "kept") -> bool:
    moved = here / other - 1
    verdict = "" if abs(moved) <= MOST_MOVED else f": more than {MOST_MOVED:.1%}"
    print(f"{what}: {here:.1f}, {of} {other:.1f} ({moved:+.2%}){verdict}")
    return not verdict


def per_step(count: Count, build: str, case: str, steps: int = STEPS, blocks: int | None = None) -> float:
    """Instructions of one step. What comes before the steps cancels out."""
    return (count(build, case, 2 * steps, blocks) - count(build, case, steps, blocks)) / steps


def count(build: str, case: str, steps: int, blocks: int | None) -> int:
    """Count under valgrind."""
    command = ["valgrind", "--tool=callgrind", "--callgrind-out-file=/dev/null", str(_binary(build)), case, str(steps)]
    command += [] if blocks is None else [str(blocks)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    found = re.search(r"Collected : (\d+)", done.stderr)
    if done.returncode != 0 or found is None:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stderr}")
    return int(found[1])


def _build(build: str) -> None:
    features = "stub_hash" + (f",{build}" if build else "")
    command = ["cargo", "build", "--quiet", "--release", "--locked", "--package", "blocktable-core", "--bin", "instructions"]
    command += ["--features", features, "--target-dir", str(BUILDS / (build or "plain"))]
    # Flags for this processor alone would give figures for this processor alone.
    environment = {name: value for name, value in os.environ.items() if name not in ("RUSTFLAGS", "CARGO_TARGET_DIR")}
    subprocess.run(command, cwd=ROOT, env=environment, check=True)


def _binary(build: str) -> Path:
    return BUILDS / (build or "plain") / "release" / "instructions"


def _compiler() -> str:
    version = subprocess.run(["rustc", "--version"], capture_output=True, text=True, check=True).stdout.split()[:2]
    return f"{' '.join(version)} on {platform.machine()}"


if __name__ == "__main__":
    sys.exit(main())
