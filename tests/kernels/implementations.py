"""The implementations of the kernels under test, and copies of them with one line changed.

Before: a test asks for one by name. After: every test body runs on all of them. Always: a changed copy is a package of its
own made from the files of `kernels/`, and the text that it replaces stands there exactly once, so no mutant dies unseen
when a line is rewritten.
"""

import linecache
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from importlib import import_module
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import blocktable.kernels
from blocktable._core import cpu_instructions
from blocktable.kernels import AttentionBatch
from blocktable.model import cpu_attention

SOURCES = Path(blocktable.kernels.__file__).parent

Change = tuple[str, str, str]
"""File, text, what stands there instead."""


@dataclass(frozen=True)
class Implementation:
    """One implementation's doors."""

    name: str
    store_kv: Callable[..., None]
    paged_attention: Callable[..., Any]
    build: Callable[..., Any]
    package: ModuleType

    @classmethod
    def of(cls, name: str, package: ModuleType) -> "Implementation":
        reference = sys.modules[f"{package.__name__}.reference"]
        batch = sys.modules[f"{package.__name__}.attention_batch"]
        return cls(name, reference.store_kv, reference.paged_attention, batch.AttentionBatch.build, package)


@cache
def changed(*changes: Change) -> ModuleType:
    """A copy of `blocktable.kernels` in which each change is made."""
    files = {path.stem: path.read_text(encoding="utf-8") for path in SOURCES.glob("*.py") if path.stem != "__init__"}
    if find_spec("triton") is None:
        files = {file: text for file, text in files.items() if not file.startswith("triton_")}
    for file, text, instead in changes:
        if files[file].count(text) != 1:
            raise LookupError(f"{file}.py holds {files[file].count(text)} times what a mutant replaces: {text!r}")
        files[file] = files[file].replace(text, instead)
    name = f"changed_kernels_{len([n for n in sys.modules if n.startswith('changed_kernels_') and '.' not in n])}"
    package = ModuleType(name)
    package.__path__ = []
    package.__spec__ = ModuleSpec(name, None, is_package=True)
    sys.modules[name] = package
    finder = _Sources(name, files)
    sys.meta_path.insert(0, finder)
    try:
        for file in files:
            import_module(f"{name}.{file}")
    finally:
        sys.meta_path.remove(finder)
    return package


class _Sources:
    """Finds and runs the modules of one changed copy."""

    def __init__(self, package: str, files: dict[str, str]) -> None:
        self.package = package
        self.files = files

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        parent, _, file = fullname.rpartition(".")
        return ModuleSpec(fullname, self) if parent == self.package and file in self.files else None

    def create_module(self, spec: ModuleSpec) -> None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        file = module.__name__.rpartition(".")[2]
        place = f"<{module.__name__}.py>"
        # Triton reads the text of its kernels; what is in no file is looked up here.
        linecache.cache[place] = (len(self.files[file]), None, self.files[file].splitlines(keepends=True), place)
        exec(compile(self.files[file], place, "exec"), module.__dict__)


REFERENCE = Implementation.of("reference", blocktable.kernels)

# Every bound on memory so low that the tests' small shapes meet it: several tiles a chunk, several groups a batch.
SMALL_BOUNDS: tuple[Change, ...] = (
    ("row_group", "TILE_QUERIES = 256", "TILE_QUERIES = 4"),
    ("row_group", "GATHER_ELEMENTS = 2 << 20", "GATHER_ELEMENTS = 1500"),
    ("row_group", "SCORE_ELEMENTS = 8 << 20", "SCORE_ELEMENTS = 600"),
    ("sequence_groups", "FREE_PAIRS = 1024", "FREE_PAIRS = 8"),
    ("sequence_groups", "MASK_PAIRS = 16 << 20", "MASK_PAIRS = 300"),
    ("scratch", "KEPT_ELEMENTS = 4 << 20", "KEPT_ELEMENTS = 200"),
)
SMALL_TILES = Implementation.of("reference-small-tiles", changed(*SMALL_BOUNDS))


def _cpu(instructions: str) -> Implementation:
    """The core's SIMD kernels with these instructions."""
    attend = partial(cpu_attention.paged_attention, instructions=instructions)
    return Implementation(f"cpu-{instructions}", cpu_attention.store_kv, attend, AttentionBatch.build, blocktable.kernels)


CPU = [_cpu(instructions) for instructions in cpu_instructions()]

IMPLEMENTATIONS = [REFERENCE, SMALL_TILES, *CPU]
