"""Promise: without the engine's dependencies the package imports, the core works, help is shown, and whoever uses the engine is
told which extra to install."""

import subprocess
import sys

import pytest

BLOCKED = ("torch", "transformers", "tokenizers", "gguf", "accelerate", "triton")


def run_without_torch(code: str) -> subprocess.CompletedProcess[str]:
    """`code` in a process in which those packages cannot be found."""
    block = f"import sys\nfor name in {BLOCKED!r}: sys.modules[name] = None\n"
    return subprocess.run([sys.executable, "-c", block + code], capture_output=True, text=True, timeout=100, check=False)


def run_command(*arguments: str) -> subprocess.CompletedProcess[str]:
    return run_without_torch(f"from blocktable.cli.command import main\nsys.exit(main({list(arguments)!r}))")


def test_the_core_and_the_parameters_work() -> None:
    done = run_without_torch(
        "import blocktable\n"
        "s = blocktable.Scheduler(num_blocks=9, block_size=4, vocab_size=9, max_model_len=16)\n"
        "s.submit([1, 2, 3], max_tokens=1)\n"
        "with blocktable.PrefixCache(blocktable.BlockPool(9, 4)).match([1, 2, 3])[0] as table:\n"
        "    print(table.append(3)[0].tolist())\n"
        "print(s.plan(0).token_ids.tolist(), blocktable.SamplingParams(max_tokens=3).max_tokens)\n"
        "print(blocktable.RequestOutput.__name__, blocktable.EngineConfig().block_size, blocktable.KVReport.__name__)\n"
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "[4, 5, 6]\n[1, 2, 3] 3\nRequestOutput 16 KVReport\n"


@pytest.mark.parametrize("use", ["blocktable.LLM", "from blocktable import LLM"])
def test_the_engine_names_its_extra(use: str) -> None:
    done = run_without_torch(
        f"import blocktable\ntry:\n    {use}\nexcept blocktable.MissingExtraError as error:\n"
        "    print(error.extra, '|', error)\n"
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("engine | blocktable.LLM needs torch")
    assert 'pip install "blocktable[engine]"' in done.stdout


def test_generate_says_in_one_line_what_is_missing() -> None:
    done = run_command("generate", "hello", "--model", "some/model")
    assert done.returncode == 2
    assert done.stderr.startswith("blocktable: error: blocktable.LLM needs torch")
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    "arguments", [["--help"], ["generate", "--help"], ["serve", "--help"], ["bench", "--help"], ["--version"]]
)
def test_help_is_shown(arguments: list[str]) -> None:
    done = run_command(*arguments)
    assert done.returncode == 0, done.stderr
    assert "blocktable" in done.stdout


def test_a_benchmark_of_the_core_runs() -> None:
    done = run_command("bench", "hash", "--smoke", "--json")
    assert done.returncode == 0, done.stderr
    assert '"ns_per_block"' in done.stdout
