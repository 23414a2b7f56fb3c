"""Owns the model directory that the tests of the command line load, and how they start the command."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from blocktable.cli.command import main
from tests.engine.tiny_llama import make_model, make_tokenizer

Command = Callable[..., int]


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model with a very long reach and a tokenizer, as transformers saves them."""
    folder = tmp_path_factory.mktemp("models") / "tiny"
    make_model(max_position_embeddings=100_000).save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture
def command(model_dir: Path, one_torch_thread: None) -> Command:
    """Run `blocktable generate` in this process on that model; returns the exit code."""
    few = ["--num-blocks", "200", "--max-model-len", "256", "--no-self-check"]
    return lambda *arguments: main(["generate", "--model", str(model_dir), *few, *arguments])


def start(*arguments: str, **environment: str) -> subprocess.Popen[str]:
    """`python -m blocktable` with these arguments, in a process of its own."""
    options = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    line = [sys.executable, "-u", "-m", "blocktable", *arguments]
    return subprocess.Popen(line, text=True, encoding="utf-8", env=os.environ | environment, **options)
