"""The wheel as a user gets it: what is in it, and that its core runs where there is nothing but numpy."""

import importlib.metadata
import json
import os
import shutil
import stat
import subprocess
import sys
import tarfile
import venv
import zipfile
from email.parser import Parser
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.timeout(900)  # an optimised build may be part of it

CORE_ALONE = """
import importlib.util, sys
import numpy as np
import blocktable
from blocktable import Scheduler, _core

assert importlib.util.find_spec("torch") is None
scheduler = Scheduler(num_blocks=32, block_size=4, vocab_size=100, max_model_len=64)
prompt = list(range(10))
request = scheduler.submit(prompt, max_tokens=5)
context, ended = [], []
while (plan := scheduler.plan(0)).num_seqs:
    context += plan.token_ids.tolist()
    fake = np.array([sum(context) % 100])  # the next token depends on every token so far
    ended += scheduler.commit(plan.step, fake, np.array([0, 1]), 0).ended.tolist()
    scheduler.audit()
expected = list(prompt)
for _ in range(4):
    expected.append(sum(expected) % 100)
assert context == expected, (context, expected)
assert ended == [[request, _core.END_FINISHED_LENGTH]], ended
again = scheduler.submit(prompt, max_tokens=1)
assert scheduler.plan(0).num_seqs == 1 and scheduler.num_cached_tokens(again) == 8

try:
    blocktable.LLM
except blocktable.MissingExtraError as error:
    assert error.extra == "engine" and "blocktable[engine]" in str(error), error
else:
    raise SystemExit("LLM came without torch")
assert isinstance(blocktable.MissingExtraError("a", "b", "c"), ImportError)

cache = blocktable.PrefixCache(blocktable.BlockPool(32, 4))
with cache.match(prompt)[0] as table:
    assert table.append(10)[0].tolist() == list(range(4, 14))
    assert cache.publish(table, prompt) == 2
assert cache.match(prompt)[1] == 8

from blocktable import testing
testing.run_schedule(seed=7)
assert testing.find_bug(testing.BlocktableAllocator, model=testing.PlainAllocator, scripts=5) is None
if importlib.util.find_spec("hypothesis") is None:
    try:
        testing.allocator_machine
    except blocktable.MissingExtraError as error:
        assert error.extra == "testing", error
    else:
        raise SystemExit("a state machine came without hypothesis")
assert _core.MUTANTS == (), _core.MUTANTS
assert _core.allocations() == 0
assert not {"torch", "transformers", "triton"} & set(sys.modules)
print("ran")
"""


def maturin(*arguments: str) -> None:
    if find_spec("maturin") is None or shutil.which("cargo") is None:
        pytest.skip("needs maturin and cargo to build the wheel")
    done = subprocess.run([sys.executable, "-m", "maturin", *arguments], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="session")
def wheel(tmp_path_factory) -> Path:
    """The wheel, built as `make wheel` builds it."""
    out = tmp_path_factory.mktemp("wheel")
    maturin("build", "--release", "--locked", "--out", str(out))
    (built,) = out.glob("*.whl")
    return built


@pytest.fixture(scope="session")
def names(wheel) -> dict[str, zipfile.ZipInfo]:
    with zipfile.ZipFile(wheel) as archive:
        return {info.filename: info for info in archive.infolist()}


@pytest.fixture(scope="session")
def metadata(wheel, names):
    (name,) = [name for name in names if name.endswith(".dist-info/METADATA")]
    with zipfile.ZipFile(wheel) as archive:
        return Parser().parsestr(archive.read(name).decode())


@pytest.fixture(scope="session")
def numpy_only(wheel, tmp_path_factory) -> Path:
    """The `bin` folder of a virtual environment that holds the wheel and numpy; numpy is copied, so no network is needed."""
    home = tmp_path_factory.mktemp("numpy_only") / "venv"
    venv.create(home, with_pip=False, symlinks=os.name != "nt")
    where = [home / "bin/python", "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"]
    packages = Path(subprocess.check_output(where, text=True).strip())
    for entry in {Path(file.locate()).relative_to(site()).parts[0] for file in importlib.metadata.files("numpy") or ()}:
        if entry not in ("..", "bin") and (site() / entry).is_dir():
            shutil.copytree(site() / entry, packages / entry, ignore=shutil.ignore_patterns("tests", "__pycache__"))
    pip = [sys.executable, "-m", "pip", "--python", str(home / "bin/python")]
    subprocess.run([*pip, "install", "--quiet", "--no-index", "--no-deps", str(wheel)], check=True)
    subprocess.run([*pip, "check"], check=True)
    return home / "bin"


def site() -> Path:
    """Where this interpreter's packages lie."""
    return Path(str(importlib.metadata.distribution("numpy").locate_file("")))


def run_alone(command: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    """Run outside the checkout, with nothing of this process's Python settings."""
    ours = ("PYTHON", "BLOCKTABLE", "VIRTUAL_ENV")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300)


def test_the_kernels_are_in_the_wheel_as_regular_files(wheel, names):
    kernels = sorted((ROOT / "kernels").glob("*.py"))
    assert kernels
    with zipfile.ZipFile(wheel) as archive:
        for path in kernels:
            info = names[f"blocktable/kernels/{path.name}"]
            assert not stat.S_ISLNK(info.external_attr >> 16), info.filename
            assert archive.read(info) == path.read_bytes()
    assert "blocktable/kernels/__init__.py" in names


def test_the_wheel_holds_the_package_and_nothing_beside_it(names):
    tops = {name.split("/")[0] for name in names}
    assert {top for top in tops if not top.endswith((".dist-info", ".libs"))} == {"blocktable"}
    assert {"blocktable/_core.abi3.so", "blocktable/_core.pyi", "blocktable/py.typed"} <= set(names)
    assert not [name for name in names if "__pycache__" in name or "/tests/" in name]
    sources = {str(path.relative_to(ROOT / "python")) for path in (ROOT / "python/blocktable").rglob("*.py")}
    assert sources == {name for name in names if name.endswith(".py")}


def test_the_files_of_the_dashboard_are_in_the_wheel(names):
    page = {f"blocktable/server/dashboard/{path.name}" for path in (ROOT / "python/blocktable/server/dashboard").iterdir()}
    assert len(page) >= 5
    assert page <= set(names)


def test_one_wheel_serves_every_python_from_3_11_on(wheel, metadata):
    assert "-cp311-abi3-" in wheel.name
    assert metadata["Requires-Python"] == ">=3.11"


def test_the_licence_and_the_extras_are_declared(names, metadata):
    assert metadata["License-Expression"] == "Apache-2.0"
    assert [name for name in names if name.endswith("licenses/LICENSE")]
    needed = metadata.get_all("Requires-Dist")
    assert [need for need in needed if "extra" not in need] == ["numpy>=2"]
    assert set(metadata.get_all("Provides-Extra")) == {"engine", "server", "structured", "tracing", "events", "testing", "all"}
    assert "torch>=2.11 ; extra == 'engine'" in needed


def test_the_core_runs_to_the_end_with_numpy_alone(numpy_only, tmp_path):
    done = run_alone([str(numpy_only / "python"), "-c", CORE_ALONE], tmp_path)
    assert (done.returncode, done.stdout) == (0, "ran\n"), done.stderr


def test_the_command_runs_with_numpy_alone(numpy_only, tmp_path):
    done = run_alone([str(numpy_only / "blocktable"), "--help"], tmp_path)
    assert done.returncode == 0, done.stderr
    assert "bench" in done.stdout


def test_the_command_that_needs_the_engine_names_the_extra(numpy_only, tmp_path):
    done = run_alone([str(numpy_only / "blocktable"), "generate", "--demo"], tmp_path)
    assert done.returncode != 0
    assert "blocktable[engine]" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_benchmark_of_the_core_runs_with_numpy_alone(numpy_only, tmp_path):
    done = run_alone([str(numpy_only / "blocktable"), "bench", "scheduler", "--json", "--smoke"], tmp_path)
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert rows
    assert all(row["step_us_p50"] > 0 and row["gc_objects_per_step"] == 0 for row in rows)


def test_the_source_distribution_can_build_the_wheel(tmp_path):
    """It holds the Rust sources, the lock file, the licence, and the kernels as files."""
    maturin("sdist", "--out", str(tmp_path))
    (built,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(built) as archive:
        found = {member.name.split("/", 1)[1]: member for member in archive.getmembers() if "/" in member.name}
    for path in sorted((ROOT / "kernels").glob("*.py")):
        assert found[f"python/blocktable/kernels/{path.name}"].isreg()
    assert {"Cargo.lock", "Cargo.toml", "LICENSE", "README.md", "pyproject.toml"} <= set(found)
    assert {str(path.relative_to(ROOT)) for path in (ROOT / "rust").rglob("src/**/*.rs")} <= set(found)
