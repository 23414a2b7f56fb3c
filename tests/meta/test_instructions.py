"""The instruction counts are compared as promised: what moves too far fails, what cannot be compared is counted."""

import importlib.util
import json
from pathlib import Path
from types import ModuleType

import pytest

TESTS = Path(__file__).resolve().parents[1]
COMPILER = "rustc 1.2.3 on x86_64"


@pytest.fixture(scope="module")
def instructions() -> ModuleType:
    """The script, loaded from its file."""
    spec = importlib.util.spec_from_file_location("instructions_under_test", TESTS / "instructions.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def counting(per_sequence: float, saved: float = 0, noise: int = 0, growth: float = 0):
    """A count that finds so many instructions per sequence and step, beside those of the start. Without retention there are
    `saved` fewer a step, and `noise` fewer in a long run; in a pool of a million blocks there are `growth` times more."""

    def count(build: str, case: str, steps: int, blocks: int | None) -> int:
        less = saved * steps + noise * (steps > 100) if build else 0
        more = growth if blocks == 1_000_000 else 0
        return 1_000_000 + round(per_sequence * (1 + more) * 1024 * steps - less)

    return count


@pytest.mark.parametrize(
    "here, saved, noise, good",
    [
        (100, 0, 0, True),
        (101.9, 0, 0, True),
        (102.1, 0, 0, False),
        (97.9, 0, 0, False),
        (100, 1, 0, False),
        (100, -1, 0, False),
        (100, 0, 40, True),
    ],
)
def test_what_moves_by_two_percent_fails_and_so_does_an_instruction_for_nothing(instructions, here, saved, noise, good):
    kept = {"compiler": COMPILER, "cases": dict.fromkeys(instructions.CASES, 100.0)}
    assert instructions.check(counting(here, saved, noise), kept, COMPILER) == good


@pytest.mark.parametrize("growth, good", [(0.019, True), (0.021, False), (-0.021, False)])
def test_a_step_that_costs_more_in_a_larger_pool_fails(instructions, growth, good):
    kept = {"compiler": COMPILER, "cases": dict.fromkeys(instructions.CASES, 100.0)}
    assert instructions.check(counting(100, growth=growth), kept, COMPILER) == good


def test_figures_of_another_compiler_are_shown_and_counted_as_skipped(instructions, capsys):
    kept = {"compiler": "another", "cases": dict.fromkeys(instructions.CASES, 100.0)}
    assert instructions.check(counting(150), kept, COMPILER)
    assert "skipped 2 comparisons" in capsys.readouterr().out
    assert not instructions.check(counting(150, saved=1), kept, COMPILER), "retention is compared all the same"


def test_without_valgrind_the_check_says_so_and_is_counted(instructions, capsys, monkeypatch):
    monkeypatch.setattr(instructions.shutil, "which", lambda tool: None if tool == "valgrind" else tool)
    assert instructions.main() == 0
    assert capsys.readouterr().out == "valgrind not found: skipped 5 comparisons of instruction counts\n"


def test_a_figure_is_kept_for_every_case(instructions):
    kept = json.loads(instructions.KEPT.read_text())
    assert set(kept["cases"]) == set(instructions.CASES)
    assert all(figure > 0 for figure in kept["cases"].values())
