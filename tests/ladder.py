"""Owns the order of the tests: the rungs of `make test`, each run in a process of its own, timed and counted.

Before: `make test` and `make soak`. After: the closing line, `total: N passed, N failed, N skipped`, and an exit code of
0 only if nothing failed. A rung fails that finds no test: a ladder with a missing rung must not look whole.
A broken core is told first, within minutes. All rungs run, whatever failed.
"""

import argparse
import os
import re
import secrets
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parent.parent
HANGS_AFTER_S = 1800
"""A rung that is not done by then hangs where no test's own timeout can reach it, and is ended."""
SOAK_CASES = 100_000
"""Cases of each random test of the Rust crate in a soak, unless BLOCKTABLE_CASES says otherwise."""


@dataclass(frozen=True)
class Rung:
    """One command whose tests are counted together."""

    name: str
    promise: str
    folders: tuple[str, ...] = ()  # under tests/; none = the Rust crate
    races: bool = False  # the Rust crate under the model checker, which explores interleavings
    with_mutants: bool = False  # run only the tests that need planted faults, on the build that has them


@dataclass
class Count:
    """What came of some tests."""

    passed: int = 0
    failed: int = 0
    skipped: int = 0
    reasons: dict[str, int] = field(default_factory=dict)  # why skipped, and how often

    def __str__(self) -> str:
        return f"{self.passed} passed, {self.failed} failed, {self.skipped} skipped"

    def add(self, other: "Count") -> None:
        self.passed += other.passed
        self.failed += other.failed
        self.skipped += other.skipped
        for reason, times in other.reasons.items():
            self.reasons[reason] = self.reasons.get(reason, 0) + times


RUNGS = (
    Rung("core", "the Rust core on its own"),
    Rung("races", "every race of the free queue, in every interleaving", races=True),
    Rung("border", "the core from Python", ("border",)),
    Rung("events", "an index rebuilt from the events is the index", ("events",)),
    Rung("faults", "random schedules and the field's faults, audited after each step", ("property", "faults")),
    Rung(
        "mutants",
        "each check fails on the fault that it is there for",
        ("border", "events", "property", "faults", "engine"),
        with_mutants=True,
    ),
    Rung("kernels", "each kernel against its slow twin", ("kernels",)),
    Rung("text", "ids and words", ("text",)),
    Rung("sampling", "one id per sequence", ("sampling",)),
    Rung("model", "paged equals unpaged, for every supported architecture", ("model",)),
    Rung("engine", "the whole engine", ("engine",)),
    Rung("cli", "the commands", ("cli",)),
    Rung("meta", "the wheel, the layers, the documents, the benchmarks", ("meta",)),
)


def main() -> int:
    options = _parse()
    chosen = [rung for rung in RUNGS if not options.rung or rung.name in options.rung]
    seed = secrets.randbits(32) if options.soak else 0
    os.environ.setdefault("BLOCKTABLE_SEED", str(seed))
    print(f"seed {os.environ['BLOCKTABLE_SEED']} (BLOCKTABLE_SEED repeats it)", flush=True)
    total, lines = Count(), []
    for rung in chosen:
        print(f"\n== {rung.name}: {rung.promise}", flush=True)
        start = time.monotonic()
        count = _run(rung, options)
        lines.append(f"  {rung.name:<9}{time.monotonic() - start:7.1f} s  {count}")
        print(lines[-1], flush=True)
        total.add(count)
    _close(lines, total)
    return 1 if total.failed else 0


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [rung.name for rung in RUNGS]
    parser.add_argument("rung", nargs="*", choices=[[], *names], metavar="RUNG", help=f"only these of: {' '.join(names)}")
    parser.add_argument("--mutants", type=Path, help="the core built with planted faults; without it the rung `mutants` fails")
    parser.add_argument("--soak", action="store_true", help="the long tests too, more examples, and a new seed")
    return parser.parse_args()


def _run(rung: Rung, options: argparse.Namespace) -> Count:
    if not rung.folders:
        return _run_cargo(soak=options.soak, races=rung.races)
    environment = dict(os.environ)
    if rung.with_mutants:
        if options.mutants is None or not options.mutants.is_file():
            print("the core with planted faults has not been built: give --mutants PATH", flush=True)
            return Count(failed=1)
        environment["BLOCKTABLE_TEST_CORE"] = str(options.mutants.resolve())
    return _run_pytest(rung, environment, soak=options.soak)


def _run_cargo(*, soak: bool, races: bool) -> Count:
    """`cargo test` with planted faults built in (they sleep unless a test wakes one), its own output shown.

    With `races` the model checker stands in for the atomics, in a folder of its own: what is built so fits nothing else.
    """
    environment = {"BLOCKTABLE_CASES": str(SOAK_CASES), **os.environ} if soak else dict(os.environ)
    if shutil.which("cargo") is None:
        print("cargo was not found", flush=True)
        return Count(failed=1)
    command = ["cargo", "test", "--locked", "--package", "blocktable-core", "--features", "mutants", "--no-fail-fast"]
    if races:
        command += ["--release", "--test", "loom_queue", "--target-dir", str(ROOT / "target" / "loom")]
        environment["RUSTFLAGS"] = "--cfg loom"
    process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True)
    count = Count()
    for line in process.stdout or ():
        if not re.fullmatch(r"test .* \.\.\. ok\n|\n", line):
            print(line, end="", flush=True)
        if found := re.match(r"test result: \w+\. (\d+) passed; (\d+) failed; (\d+) ignored", line):
            count.add(Count(*map(int, found.groups())))
    return _or_failed(count, process.wait())


def _run_pytest(rung: Rung, environment: dict[str, str], *, soak: bool) -> Count:
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [sys.executable, "-m", "pytest", "-q", f"--junitxml={report}", "--durations=3", "--durations-min=5"]
        command += ["--soak"] if soak else []
        missing = [name for name in rung.folders if not (ROOT / "tests" / name).is_dir()]
        if missing:
            print(f"missing: {', '.join(missing)}", flush=True)
            return Count(failed=1)
        command += [f"tests/{name}" for name in rung.folders]
        try:
            code = subprocess.run(command, cwd=ROOT, env=environment, timeout=None if soak else HANGS_AFTER_S).returncode
        except subprocess.TimeoutExpired:
            print(f"ended: not done after {HANGS_AFTER_S} s", flush=True)
            return Count(failed=1)
        return _or_failed(_read_report(report), code)


def _or_failed(count: Count, code: int) -> Count:
    """A command that failed without a failed test (a crash, an error of collection, no test at all) counts as one."""
    if code != 0 and count.failed == 0:
        print(f"exit code {code}", flush=True)
        count.failed = 1
    if count.passed == 0 and count.failed == 0:
        print("no test passed", flush=True)
        count.failed = 1
    return count


def _read_report(report: Path) -> Count:
    """Counts from pytest's XML report; an error counts as a failure."""
    if not report.is_file():
        return Count()
    count = Count()
    for case in ElementTree.parse(report).getroot().iter("testcase"):
        skipped = case.find("skipped")
        if case.find("failure") is not None or case.find("error") is not None:
            count.failed += 1
        elif skipped is not None:
            count.add(Count(skipped=1, reasons={skipped.get("message", "no reason given"): 1}))
        else:
            count.passed += 1
    return count


def _close(lines: list[str], total: Count) -> None:
    print("\n== rungs", *lines, sep="\n")
    for reason, times in sorted(total.reasons.items()):
        print(f"  skipped {times}: {reason}")
    print(f"\ntotal: {total}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
