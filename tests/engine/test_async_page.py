"""docs/async.md is true: its code runs, and what it returns is what `LLM` says."""

import re
from pathlib import Path
from typing import Any

import pytest

import blocktable
from blocktable import AsyncLLM, EngineDeadError, SamplingParams

from .conftest import MakeAsync, MakeLLM

PAGE = (Path(__file__).resolve().parents[2] / "docs/async.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)


def test_every_block_of_code_runs(
    make_async: MakeAsync, make_llm: MakeLLM, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(blocktable, "AsyncLLM", lambda path: make_async())
    names: dict[str, Any] = {}
    for number, block in enumerate(BLOCKS):
        exec(compile(block, f"docs/async.md, block {number}", "exec"), names)
    right = make_llm().generate(["One", "Two", "Three"], SamplingParams(temperature=0, max_tokens=32))
    assert names["answers"] == [output.outputs[0].text for output in right]
    # The default is cumulative: the last line of the second block's output holds the whole.
    shown = capsys.readouterr().out
    [whole] = make_llm().generate("One", SamplingParams(temperature=0, max_tokens=8))
    assert shown.endswith(whole.outputs[0].text + "\n")


def test_what_the_page_names_exists() -> None:
    for name in ("abort", "check_health", "dead_error", "errored", "generate", "generate_blocking", "shutdown", "stalled_s"):
        assert f"`{name}" in PAGE or f".{name}(" in PAGE, name
        assert hasattr(AsyncLLM, name)
    assert issubclass(EngineDeadError, blocktable.BlocktableError)
