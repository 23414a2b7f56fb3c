"""The folder `kernels/` stands alone, and all of it reaches the package."""

import ast
from pathlib import Path

import pytest

import blocktable.kernels

PACKAGE = Path(blocktable.kernels.__file__).parent
FOLDER = Path(__file__).resolve().parents[2] / "kernels"


def test_every_kernel_file_has_its_own_link() -> None:
    if not (PACKAGE / "reference.py").is_symlink():
        pytest.skip("the package is installed from a wheel, which has files in place of links")
    links = {path.name: path.resolve() for path in PACKAGE.glob("*.py") if path.name != "__init__.py"}
    assert links == {path.name: path for path in FOLDER.glob("*.py")}


@pytest.mark.parametrize("file", sorted(FOLDER.glob("*.py")), ids=lambda path: path.name)
def test_a_kernel_file_imports_only_its_siblings_and_torch(file: Path) -> None:
    allowed = {"__future__", "collections", "dataclasses", "functools", "itertools", "math", "torch", "triton", "typing"}
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            assert {name.name.partition(".")[0] for name in node.names} <= allowed
        if isinstance(node, ast.ImportFrom):
            assert node.module is not None
            inside = node.level == 1 and (FOLDER / f"{node.module}.py").is_file()
            assert inside or (node.level == 0 and node.module.partition(".")[0] in allowed)
