"""Who may know whom. The walk of a request goes one way, and so do the imports; the core knows nothing of Python.

Read from the sources, so that a forbidden import is found even where no test runs it.
"""

import ast
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "python" / "blocktable"
KERNELS = sorted((ROOT / "kernels").glob("*.py"))

# room: the rooms of ours that it may import. What is not here may be imported by nobody.
MAY_IMPORT = {
    "errors": set(),
    "checks": {"errors"},
    "openmp": set(),
    "kernels": set(),
    "text": {"errors", "sampling.params"},
    "sampling": {"checks", "errors"},
    "model": {"errors", "kernels", "_core", "engine.config"},
    "events": {"checks", "errors"},
    "engine": {"checks", "errors", "_core", "events", "model", "retention", "sampling", "text"},
    "server": {"checks", "errors", "_core", "engine", "events", "openmp", "sampling", "text"},
    "testing": {"errors", "_core"},
    "bench": {"errors", "_core", "kernels", "engine", "openmp", "sampling", "model", "text", "testing", "server", ""},
    "cli": {"errors", "_core", "engine", "sampling", "model", "text", "testing", "bench", "server", ""},
    "__main__": {"cli"},
}
HEAVY = {"torch", "triton", "transformers", "tokenizers", "safetensors", "accelerate", "gguf", "jinja2"}
WITHOUT_HEAVY = (
    "__init__.py",
    "__main__.py",
    "checks.py",
    "errors.py",
    "openmp.py",
    "testing",
    "bench",
    "cli",
    "sampling/params.py",
    "engine/config.py",
    "events",
    "retention.py",
    "model/small_model.py",
)
"""What has to be importable with numpy alone."""


def sources(room: str = "") -> list[Path]:
    return sorted(path for path in (PACKAGE / room).rglob("*.py"))


def imported(tree: ast.AST, package: str) -> Iterator[str]:
    """Full names of what is imported anywhere below `tree`, which is a part of the module's package `package`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: len(package.split(".")) - (node.level - 1)] if node.level else []
            module = ".".join([*above, *([node.module] if node.module else [])])
            yield module
            yield from (f"{module}.{alias.name}" for alias in node.names)


class OnlyAtImport(ast.NodeTransformer):
    """Drops the bodies of functions, and what only a type checker reads."""

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        return None

    def visit_AsyncFunctionDef(self, node: ast.AsyncFunctionDef) -> None:
        return None

    def visit_If(self, node: ast.If) -> ast.AST | None:
        for_types = isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"
        return None if for_types else self.generic_visit(node)


def at_import_time(text: str, package: str) -> set[str]:
    """First parts of the names that a module imports while it is itself imported."""
    return {name.split(".")[0] for name in imported(OnlyAtImport().visit(ast.parse(text)), package)}


def package_of(path: Path) -> str:
    return ".".join(["blocktable", *path.relative_to(PACKAGE).parts[:-1]])


def room_of(name: str) -> str | None:
    """`blocktable.engine.llm` is of `engine`; `blocktable` itself and its public names are of ``."""
    parts = name.split(".")
    if parts[0] != "blocktable":
        return None
    rest = parts[1] if len(parts) > 1 else ""
    return rest if rest in MAY_IMPORT or rest == "_core" else ""


def forbidden(text: str, room: str, package: str) -> list[str]:
    """Names of ours that a source of `room` imports and must not."""
    allowed = MAY_IMPORT[room] | {room}
    found = []
    for name in imported(ast.parse(text), package):
        other = room_of(name)
        if other is None or other in allowed or name == package:
            continue
        if other == "" and name in ("blocktable",):  # `from .. import errors` names the package, and then the room
            continue
        if not any(name == f"blocktable.{one}" or name.startswith(f"blocktable.{one}.") for one in allowed if one):
            found.append(name)
    return found


@pytest.mark.parametrize("room", [room for room in MAY_IMPORT if room not in ("errors", "checks", "openmp", "__main__")])
def test_a_room_imports_only_the_rooms_behind_it(room):
    assert sources(room), f"python/blocktable/{room} has no sources"
    found = {str(path.relative_to(ROOT)): forbidden(path.read_text(), room, package_of(path)) for path in sources(room)}
    assert {path: names for path, names in found.items() if names} == {}


def test_every_room_has_its_rule():
    rooms = {path.name for path in PACKAGE.iterdir() if path.is_dir() and path.name != "__pycache__"}
    assert rooms <= set(MAY_IMPORT)


@pytest.mark.parametrize("place", WITHOUT_HEAVY)
def test_the_core_rooms_load_without_torch(place):
    files = sources(place) if (PACKAGE / place).is_dir() else [PACKAGE / place]
    assert files
    for path in files:
        assert not at_import_time(path.read_text(), package_of(path)) & HEAVY, path


def test_kernels_import_nothing_of_ours_but_their_siblings():
    assert KERNELS, "no kernels"
    siblings = {path.stem for path in KERNELS}
    for path in KERNELS:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                assert not any(alias.name.split(".")[0] in ("blocktable", "kernels") for alias in node.names), path
            elif isinstance(node, ast.ImportFrom) and node.level == 0:
                assert node.module is not None
                assert node.module.split(".")[0] not in ("blocktable", "kernels"), path
            elif isinstance(node, ast.ImportFrom):
                assert node.level == 1, path
                names = [node.module.split(".")[0]] if node.module else [alias.name for alias in node.names]
                assert set(names) <= siblings, path


def test_every_kernel_has_its_link_and_every_link_its_kernel():
    links = {path.name: path for path in (PACKAGE / "kernels").glob("*.py") if path.name != "__init__.py"}
    assert set(links) == {path.name for path in KERNELS}
    for name, link in links.items():
        assert link.is_symlink(), f"{name} is a copy, which edits would miss"
        assert link.resolve() == (ROOT / "kernels" / name).resolve()
    assert not (PACKAGE / "kernels" / "__init__.py").is_symlink()


def test_the_kernels_folder_is_no_package():
    """With an `__init__.py` it would answer to a name that belongs to another package whenever the root is on the path."""
    assert not (ROOT / "kernels" / "__init__.py").exists()


def test_only_the_mains_of_processes_touch_signals():
    """The command line, and the processes that a server and a benchmark start. The trial of grammars reads names of signals."""
    processes = ("server/engine_process.py", "bench/counting_server.py", "sampling/grammar_trial.py")
    mains = (PACKAGE / "cli", *(PACKAGE / name for name in processes))
    for path in sources():
        if not any(path.is_relative_to(main) for main in mains):
            names = imported(ast.parse(path.read_text()), package_of(path))
            assert "signal" not in {name.split(".")[0] for name in names}, path


def test_the_core_knows_no_python_and_no_unsafe_code():
    cargo = tomllib.loads((ROOT / "rust/core/Cargo.toml").read_text())
    for table in ("dependencies", "dev-dependencies", "build-dependencies"):
        assert not [name for name in cargo.get(table, {}) if "py" in name.lower()]
    rust = sorted((ROOT / "rust/core").rglob("*.rs"))
    assert rust
    for path in rust:
        assert "pyo3" not in path.read_text(), path
    assert "#![forbid(unsafe_code)]" in (ROOT / "rust/core/src/lib.rs").read_text()


def test_unsafe_code_lives_where_it_is_told_and_gives_its_reasons():
    allowed = {ROOT / "rust/py/src/buffer.rs"}  # memory that Python sees
    allowed |= set((ROOT / "rust/cpu").rglob("*.rs"))  # instructions and pointers are what it is about, and all memory
    for path in sorted((ROOT / "rust").rglob("*.rs")):
        lines = [line.split("//")[0] for line in path.read_text().splitlines()]
        uses = [number for number, line in enumerate(lines) if re.search(r"\bunsafe\b(?!_)", line) and "forbid(" not in line]
        assert not uses or path in allowed, f"{path}: line {uses[0] + 1}"
        for number in uses:
            around = path.read_text().splitlines()[max(0, number - 8) : number + 5]
            assert any("safety" in line.lower() for line in around), f"{path}: line {number + 1} gives no reason"


PLANTED = {
    "text/a.py": ("text", "from ..engine.llm import LLM"),
    "text/b.py": ("text", "from blocktable.engine import llm"),
    "text/c.py": ("text", "def later():\n    import blocktable.engine.llm"),
    "sampling/a.py": ("sampling", "from .. import engine"),
    "testing/a.py": ("testing", "from ..model.runner import Runner"),
    "engine/a.py": ("engine", "from ..cli.command import main"),
    "model/a.py": ("model", "from blocktable import LLM"),
}


@pytest.mark.parametrize("planted", PLANTED)
def test_a_planted_import_is_found(planted):
    """The checks above can fail."""
    room, text = PLANTED[planted]
    assert forbidden(text, room, f"blocktable.{room}")


def test_a_planted_torch_is_found_and_a_lazy_one_allowed():
    def heavy(text: str) -> set[str]:
        return at_import_time(text, "blocktable.testing") & HEAVY

    assert heavy("from torch import nn")
    assert heavy("try:\n    import torch\nexcept ImportError:\n    torch = None")
    assert not heavy("def run():\n    import torch")
    assert not heavy("class A:\n    def run(self):\n        import torch")
    assert not heavy("if TYPE_CHECKING:\n    import torch")
