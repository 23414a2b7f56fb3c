"""The ladder counts what ran, and a run in which nothing ran cannot look green."""

import argparse
import importlib.util
import io
import sys
import threading
from pathlib import Path
from types import ModuleType

import pytest

TESTS = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def ladder() -> ModuleType:
    """The runner, loaded from its file."""
    spec = importlib.util.spec_from_file_location("ladder_under_test", TESTS / "ladder.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def test_every_folder_of_tests_is_on_a_rung(ladder):
    """A folder that no rung names would never run."""
    folders = {path.parent.relative_to(TESTS).parts[0] for path in TESTS.rglob("test_*.py")}
    assert folders == {folder for rung in ladder.RUNGS for folder in rung.folders}


def test_every_folder_with_planted_faults_is_on_the_mutants_rung(ladder):
    (rung,) = [rung for rung in ladder.RUNGS if rung.with_mutants]
    marked = {path.parent.relative_to(TESTS).parts[0] for path in TESTS.rglob("*.py") if "mark.mutant" in path.read_text()}
    assert marked - {"meta"} <= set(rung.folders)


REPORT = """<testsuites><testsuite>
<testcase name="a"/><testcase name="b"><failure message="x"/></testcase><testcase name="c"><error message="x"/></testcase>
<testcase name="d"><skipped message="needs a GPU"/></testcase><testcase name="e"><skipped message="needs a GPU"/></testcase>
</testsuite></testsuites>"""


def test_a_report_is_counted(ladder, tmp_path):
    (tmp_path / "report.xml").write_text(REPORT)
    count = ladder._read_report(tmp_path / "report.xml")
    assert (count.passed, count.failed, count.skipped, count.reasons) == (1, 2, 2, {"needs a GPU": 2})
    assert str(count) == "1 passed, 2 failed, 2 skipped"


@pytest.mark.parametrize(
    "passed, failed, skipped, code, expected",
    [
        (3, 0, 0, 0, 0),
        (3, 0, 0, 1, 1),  # an error of collection, or a crash at the end
        (0, 0, 0, 5, 1),  # no test found
        (0, 0, 4, 0, 1),  # all skipped
        (3, 2, 0, 1, 2),
    ],
)
def test_a_rung_without_a_passed_test_or_with_a_bad_exit_has_failed(ladder, passed, failed, skipped, code, expected):
    assert ladder._or_failed(ladder.Count(passed, failed, skipped), code, io.StringIO()).failed == expected


def test_a_process_that_died_without_a_report_has_failed(ladder, tmp_path):
    assert ladder._or_failed(ladder._read_report(tmp_path / "missing.xml"), -11, io.StringIO()).failed == 1


def test_rungs_run_side_by_side_and_each_comes_out_as_one_piece(ladder, monkeypatch):
    both = threading.Barrier(2, timeout=60)  # broken unless two rungs are under way at once

    def run(rung, options, out):
        print(f"{rung.name} begins", file=out)
        both.wait()
        print(f"{rung.name} ends", file=out)
        return ladder.Count(passed=1)

    monkeypatch.setattr(ladder, "_run", run)
    done = list(ladder._run_all(list(ladder.RUNGS[:4]), argparse.Namespace(jobs=2)))
    assert {rung for rung, *_ in done} == set(ladder.RUNGS[:4])
    assert all(count.passed == 1 and text == f"{rung.name} begins\n{rung.name} ends\n" for rung, _, count, text in done)


def test_the_core_and_the_longest_rungs_start_first(ladder, monkeypatch):
    started = []
    monkeypatch.setattr(ladder, "_run", lambda rung, options, out: started.append(rung.name) or ladder.Count(passed=1))
    list(ladder._run_all(list(ladder.RUNGS), argparse.Namespace(jobs=1)))
    assert started[:4] == ["core", "server", "engine", "kernels"]
    assert sorted(started) == sorted(rung.name for rung in ladder.RUNGS)
