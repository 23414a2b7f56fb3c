"""`tests/faults.md` is right: it has every number of the catalogue, and names tests and planted faults that exist."""

import ast
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parent.parent
ROOT = TESTS.parent

# fmt: off
CATALOGUE = (
    1, 2, 4, 5, 7, 8, 10, 11, 13, 14, 16, 17, 19, 20, 22, 23, 25, 26, 28, 29, 31, 32, 34, 35, 37, 38, 40, 41, 43, 44,
    46, 47, 49, 50, 52, 53, 55, 56, 58, 59, 61, 62, 64, 65, 67, 68, 70, 71, 73, 74, 76, 77, 79, 80, 82, 83, 85, 86, 88,
    89, 91, 92, 94, 95, 97, 98, 100, 101, 103, 104, 106, 107, 109, 110, 112, 113, 115, 116, 118, 119, 121, 122, 124,
    125, 127, 128, 130, 131, 133, 134, 136, 137, 139, 140, 142,
)
# fmt: on

WITHOUT_FAULT = {139}
"""A borrow error cannot be planted beside the right code."""


@dataclass(frozen=True)
class Entry:
    """One row of the map."""

    number: int
    state: str
    tests: tuple[str, ...]
    planted: tuple[str, ...]
    to_be_built: str


def read_map(text: str) -> list[Entry]:
    """The rows of the tables: number, promise, state, tests, planted faults, still to be built."""
    entries = []
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if len(cells) == 6 and cells[0].isdigit():
            tests, planted = (tuple(re.findall(r"`([^`]+)`", cell)) for cell in cells[3:5])
            entries.append(Entry(int(cells[0]), cells[2], tests, planted, "" if cells[5] == "–" else cells[5]))
    return entries


@cache
def the_map() -> list[Entry]:
    return read_map((TESTS / "faults.md").read_text(encoding="utf-8"))


@cache
def names_in(path: Path) -> frozenset[str]:
    """Names of the functions of a file, and of what is bound in it at the top."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".rs":
        return frozenset(re.findall(r"\bfn (\w+)", text))
    tree = ast.parse(text)
    functions = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}
    bound = {
        target.id
        for node in tree.body
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    return frozenset(functions | bound)


@cache
def promises() -> dict[tuple[int, str], frozenset[str]]:
    """(number, test) -> planted faults, as the decorators of `tests/faults` have them."""
    found: dict[tuple[int, str], frozenset[str]] = {}
    for path in sorted((TESTS / "faults").glob("test_*.py")):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            for call in getattr(node, "decorator_list", ()):
                if isinstance(call, ast.Call) and ast.unparse(call.func) == "PROMISES.row":
                    planted = frozenset(_name(item) for keyword in call.keywords for item in keyword.value.elts)  # type: ignore[attr-defined]
                    for number in call.args:
                        found[ast.literal_eval(number), f"faults/{path.name}::{node.name}"] = planted  # type: ignore[attr-defined]
    return found


def core_mutants() -> set[str]:
    source = (ROOT / "rust/core/src/mutant.rs").read_text(encoding="utf-8")
    return set(re.findall(r'^    \w+ = "(\w+)",$', source, re.MULTILINE))


def _caught(rust: str | None = None) -> list[str]:
    """Planted faults that some test names, in Python or in the table of the core's tests."""
    rust = rust or (ROOT / "rust/core/tests/suite/mutants.rs").read_text(encoding="utf-8")
    names = re.findall(r"^    (\w+): \w+, &?\[", rust, re.MULTILINE)
    races = (ROOT / "rust/core/tests/loom_queue.rs").read_text(encoding="utf-8")
    for faults in re.findall(r"^    \w+, \d, \[([\w, ]+)\];", races, re.MULTILINE):
        names += [re.sub(r"(?<!^)(?=[A-Z])", "_", fault).lower() for fault in faults.split(", ")]
    for path in ("lock_freedom.rs", "queue_steps.rs", "truncate.rs", "../../src/block_pool/tests.rs"):
        names += re.findall(r'choose\(Some\("(\w+)"', (ROOT / "rust/core/tests/suite" / path).read_text(encoding="utf-8"))
    for path in TESTS.rglob("test_*.py"):
        text = path.read_text(encoding="utf-8")
        if path != Path(__file__) and ("mark.mutant" in text or path.parent.name == "faults"):
            names += re.findall(r'"(\w+)"', text)
    return names


def _name(node: ast.expr) -> str:
    return str(node.value) if isinstance(node, ast.Constant) else ast.unparse(node)


def _exists(test: str) -> bool:
    path, _, name = test.partition("::")
    file = (ROOT if path.startswith("rust/") else TESTS) / path
    return file.is_file() and name in names_in(file)


def _is_planted(name: str) -> bool:
    if "::" in name:
        return _exists(name)
    return name in core_mutants() or f"class {name}(" in (TESTS / "faults/planted.py").read_text(encoding="utf-8")


def test_every_number_of_the_catalogue_has_one_row() -> None:
    assert tuple(entry.number for entry in the_map()) == CATALOGUE


def test_every_row_says_what_is_tested_or_what_is_not_built() -> None:
    for entry in the_map():
        wanted = "to be built" if not entry.tests else "part" if entry.to_be_built else "built"
        assert entry.state == wanted, entry
        needs_fault = bool(entry.tests) and entry.number not in WITHOUT_FAULT
        assert bool(entry.planted) == needs_fault, f"{entry}: a test needs a fault that it was seen to catch"


def test_every_named_test_exists() -> None:
    missing = [test for entry in the_map() for test in entry.tests if not _exists(test)]
    assert not missing


def test_every_named_fault_exists() -> None:
    missing = [name for entry in the_map() for name in entry.planted if not _is_planted(name)]
    assert not missing


def test_the_map_says_what_the_decorators_say() -> None:
    """Each test of tests/faults stands in the row of each of its numbers, with all its planted faults."""
    rows = {entry.number: entry for entry in the_map()}
    for (number, test), planted in promises().items():
        assert test in rows[number].tests, f"{number}: {test}"
        assert planted <= set(rows[number].planted), f"{number}: {planted - set(rows[number].planted)}"


def test_every_fault_of_the_core_is_caught_by_a_promise() -> None:
    """No planted fault sleeps: each is in a row of tests/faults, in a test marked `mutant`, or in one of the core's own."""
    assert not core_mutants() - set(_caught())
    assert "no_such_fault" not in _caught('    no_such_fault_either: NoSuchFault, ["A1"], check;')


@pytest.mark.parametrize(
    "broken",
    [
        lambda text: text.replace("| 26 |", "| 27 |"),
        lambda text: text.replace("test_every_way_to_end_releases", "test_no_way_to_end_releases"),
        lambda text: text.replace("`budget_before_hit`", "`budget_after_hit`"),
        lambda text: text.replace("| to be built |", "| built |", 1),
        lambda text: re.sub(r" `keep_key_on_reuse`", "", text, count=1),
    ],
    ids=["a number", "a test", "a fault", "a state", "a decorator's fault"],
)
def test_a_map_that_is_wrong_is_caught(broken: object, monkeypatch: pytest.MonkeyPatch) -> None:
    """The control of this file: one thing is made wrong, and one of its tests fails."""
    text = (TESTS / "faults.md").read_text(encoding="utf-8")
    wrong = broken(text)  # type: ignore[operator]
    assert wrong != text
    monkeypatch.setitem(globals(), "the_map", lambda: read_map(wrong))
    with pytest.raises(AssertionError):
        _all_checks()


def _all_checks() -> None:
    test_every_number_of_the_catalogue_has_one_row()
    test_every_row_says_what_is_tested_or_what_is_not_built()
    test_every_named_test_exists()
    test_every_named_fault_exists()
    test_the_map_says_what_the_decorators_say()
