"""Owns the order of the tests: the rungs of `make test`, each run in a process of its own, timed and counted, two at a time
where there are two cores.

Before: `make test` and `make soak`. After: the closing line, `total: N passed, N failed, N skipped`, and an exit code of
0 only if nothing failed. A rung fails that finds no test: a ladder with a missing rung must not look whole.
A broken core is told within minutes. All rungs run, whatever failed. What a rung prints appears as one piece when it ends.
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
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from pathlib import Path
from typing import TextIO
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parent.parent
HANGS_AFTER_S = 1800
"""A rung that is not done by then hangs where no test's own timeout can reach it, and is ended."""
SIGN_OF_LIFE_S = 60
"""How often what still runs is named."""
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
    starts: int = 99  # in which order: the core first, then the longest, since the last to end decides how long all take


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
    Rung("core", "the Rust core and the CPU kernels on their own", starts=0),
    Rung("races", "every race of the free queue, in every interleaving", races=True, starts=4),
    Rung("border", "the core from Python", ("border",)),
    Rung("events", "an index rebuilt from the events is the index", ("events",)),
    Rung("faults", "random schedules and the field's faults, audited after each step", ("property", "faults"), starts=5),
    Rung(
        "mutants",
        "each check fails on the fault that it is there for",
        ("border", "events", "property", "faults", "engine"),
        with_mutants=True,
        starts=9,
    ),
    Rung("kernels", "each kernel against its slow twin", ("kernels",), starts=3),
    Rung("text", "ids and words", ("text",)),
    Rung("sampling", "one id per sequence", ("sampling",)),
    Rung("model", "paged equals unpaged, for every supported architecture", ("model",), starts=7),
    Rung("engine", "the whole engine", ("engine",), starts=2),
    Rung("server", "the whole engine, over HTTP", ("server",), starts=1),
    Rung("cli", "the commands", ("cli",), starts=8),
    Rung("meta", "the wheel, the layers, the documents, the benchmarks", ("meta",), starts=6),
)


def main() -> int:
    options = _parse()
    chosen = [rung for rung in RUNGS if not options.rung or rung.name in options.rung]
    seed = secrets.randbits(32) if options.soak else 0
    os.environ.setdefault("BLOCKTABLE_SEED", str(seed))
    print(f"seed {os.environ['BLOCKTABLE_SEED']} (BLOCKTABLE_SEED repeats it)", flush=True)
    total, lines = Count(), {}
    for rung, seconds, count, text in _run_all(chosen, options):
        print(f"\n== {rung.name}: {rung.promise}", text, sep="\n", end="")
        lines[rung.name] = f"  {rung.name:<9}{seconds:7.1f} s  {count}"
        print(lines[rung.name], flush=True)
        total.add(count)
    _close([lines[rung.name] for rung in chosen], total)
    return 1 if total.failed else 0


def _run_all(rungs: list[Rung], options: argparse.Namespace) -> Iterator[tuple[Rung, float, Count, str]]:
    """Each rung as it ends: its seconds, its count and what it printed."""
    order = sorted(rungs, key=lambda rung: rung.starts)
    with ThreadPoolExecutor(options.jobs) as lanes:
        running: dict[Future[tuple[float, Count, str]], Rung] = {}
        start = time.monotonic()
        while order or running:
            while order and len(running) < options.jobs:
                rung = order.pop(0)
                print(f"-- {time.monotonic() - start:5.0f} s: {rung.name} starts", flush=True)
                running[lanes.submit(_time_rung, rung, options)] = rung
            done = wait(running, SIGN_OF_LIFE_S, FIRST_COMPLETED).done
            if not done:
                names = " and ".join(rung.name for rung in running.values())
                print(f"-- {time.monotonic() - start:5.0f} s: {names} still run", flush=True)
            for future in done:
                yield running.pop(future), *future.result()


def _time_rung(rung: Rung, options: argparse.Namespace) -> tuple[float, Count, str]:
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as out:
        start = time.monotonic()
        count = _run(rung, options, out)
        seconds = time.monotonic() - start
        out.seek(0)
        return seconds, count, out.read()


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [rung.name for rung in RUNGS]
    parser.add_argument("rung", nargs="*", choices=[[], *names], metavar="RUNG", help=f"only these of: {' '.join(names)}")
    parser.add_argument("--mutants", type=Path, help="the core built with planted faults; without it the rung `mutants` fails")
    parser.add_argument("--jobs", type=int, default=min(2, os.cpu_count() or 1), help="rungs at a time (%(default)s)")
    parser.add_argument("--soak", action="store_true", help="the long tests too, more examples, and a new seed")
    options = parser.parse_args()
    if options.jobs < 1:
        parser.error(f"--jobs is {options.jobs}, it must be at least 1")
    return options


def _run(rung: Rung, options: argparse.Namespace, out: TextIO) -> Count:
    if not rung.folders:
        return _run_cargo(out, soak=options.soak, races=rung.races)
    environment = dict(os.environ)
    if options.jobs > 1:  # threads of two processes that wait for each other on the same cores are many times slower
        environment.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // options.jobs)))
    if rung.with_mutants:
        if options.mutants is None or not options.mutants.is_file():
            print("the core with planted faults has not been built: give --mutants PATH", file=out)
            return Count(failed=1)
        environment["BLOCKTABLE_TEST_CORE"] = str(options.mutants.resolve())
    return _run_pytest(rung, environment, out, soak=options.soak)


def _run_cargo(out: TextIO, *, soak: bool, races: bool) -> Count:
    """`cargo test` with planted faults built in (they sleep unless a test wakes one), its own output shown.

    With `races` the model checker stands in for the atomics, in a folder of its own: what is built so fits nothing else.
    """
    environment = {"BLOCKTABLE_CASES": str(SOAK_CASES), **os.environ} if soak else dict(os.environ)
    if shutil.which("cargo") is None:
        print("cargo was not found", file=out)
        return Count(failed=1)
    command = [
        "cargo",
        "test",
        "--locked",
        "--package",
        "blocktable-core",
        "--features",
        "blocktable-core/mutants",
        "--no-fail-fast",
    ]
    if not races:
        command += ["--package", "blocktable-cpu", "--features", "blocktable-cpu/mutants"]
    else:
        command += ["--profile", "loom", "--test", "loom_queue", "--target-dir", str(ROOT / "target" / "loom")]
        environment["RUSTFLAGS"] = "--cfg loom"
    process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    count = Count()
    for line in process.stdout or ():
        if not re.fullmatch(r"test .* \.\.\. ok\n|\n", line):
            print(line, end="", file=out)
        if found := re.match(r"test result: \w+\. (\d+) passed; (\d+) failed; (\d+) ignored", line):
            count.add(Count(*map(int, found.groups())))
    return _or_failed(count, process.wait(), out)


def _run_pytest(rung: Rung, environment: dict[str, str], out: TextIO, *, soak: bool) -> Count:
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [sys.executable, "-m", "pytest", "-q", f"--junitxml={report}", "--durations=3", "--durations-min=5"]
        command += ["--soak"] if soak else []
        missing = [name for name in rung.folders if not (ROOT / "tests" / name).is_dir()]
        if missing:
            print(f"missing: {', '.join(missing)}", file=out)
            return Count(failed=1)
        command += [f"tests/{name}" for name in rung.folders]
        try:
            limit = None if soak else HANGS_AFTER_S
            out.flush()
            code = subprocess.run(
                command, cwd=ROOT, env=environment, timeout=limit, stdout=out, stderr=subprocess.STDOUT
            ).returncode
        except subprocess.TimeoutExpired:
            print(f"ended: not done after {HANGS_AFTER_S} s", file=out)
            return Count(failed=1)
        out.seek(0, os.SEEK_END)  # behind what the process wrote
        return _or_failed(_read_report(report), code, out)


def _or_failed(count: Count, code: int, out: TextIO) -> Count:
    """A command that failed without a failed test (a crash, an error of collection, no test at all) counts as one."""
    if code != 0 and count.failed == 0:
        print(f"exit code {code}", file=out)
        count.failed = 1
    if count.passed == 0 and count.failed == 0:
        print("no test passed", file=out)
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
