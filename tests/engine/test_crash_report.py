"""Promise: when the scheduler itself fails under the engine, what entered it is in a file that the error names, and replays."""

import json
import logging
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from blocktable import SamplingParams
from blocktable.replay import replayed

from .conftest import MakeLLM
from .faults import faulty_model, raising

TEN = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True)
PROMPT = {"prompt_token_ids": [1, 2, 3]}


def broken(*_: object) -> None:
    raise RuntimeError("the books are wrong")


def reports(folder: Path) -> list[Path]:
    return sorted(folder.glob("blocktable-crash-*.btrec"))


def test_a_step_that_fails_leaves_a_report_that_replays(
    make_llm: MakeLLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    llm = make_llm(crash_report_folder=str(tmp_path))
    llm.generate(PROMPT, TEN)

    monkeypatch.setattr(llm._open.loop._hand_out, "take", broken)
    with caplog.at_level(logging.ERROR), pytest.raises(RuntimeError, match="the books are wrong") as caught:
        llm.generate(PROMPT, TEN)
    (path,) = reports(tmp_path)
    assert any(str(path) in note for note in caught.value.__notes__)
    assert path.stat().st_mode & 0o777 == 0o600
    # The report ends where the step failed; what cleaned up after it is not in it.
    assert replayed(path).plans > 10
    monkeypatch.undo()
    assert len(llm.generate(PROMPT, TEN)[0].outputs[0].token_ids) == 10
    assert len(reports(tmp_path)) == 1


def replayed_elsewhere(path: Path) -> tuple[int, dict[str, Any]]:
    """What another process says of a report: its exit code, and what it prints."""
    command = [sys.executable, "-m", "blocktable", "replay", "--json", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    return done.returncode, json.loads(done.stdout or "{}")


def test_another_process_replays_the_report(make_llm: MakeLLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the last seconds, every plan is made again, bit for bit; a report that was changed is not taken for one."""
    llm = make_llm(crash_report_folder=str(tmp_path))
    llm.generate([PROMPT, {"prompt_token_ids": [1, 2, 4, 5]}], TEN)
    monkeypatch.setattr(llm._open.loop._hand_out, "take", broken)
    with pytest.raises(RuntimeError, match="the books are wrong"):
        llm.generate(PROMPT, TEN)
    (path,) = reports(tmp_path)
    here = replayed(path)
    code, there = replayed_elsewhere(path)
    assert code == 0
    assert there["plans"] == here.plans > 10
    assert there["difference"] is None
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    code, _ = replayed_elsewhere(path)
    assert code != 0


def test_neither_a_failing_model_nor_an_interrupt_is_reported(make_llm: MakeLLM, tmp_path: Path) -> None:
    llm = make_llm(crash_report_folder=str(tmp_path))
    with faulty_model(llm, raising(RuntimeError("no memory")), {1}):
        llm.generate(PROMPT, TEN)
    with faulty_model(llm, raising(KeyboardInterrupt()), {1}), pytest.raises(KeyboardInterrupt):
        llm.generate(PROMPT, TEN)
    assert reports(tmp_path) == []


def test_a_folder_that_is_not_there_hides_nothing(make_llm: MakeLLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = make_llm(crash_report_folder=str(tmp_path / "missing"))

    monkeypatch.setattr(llm._open.loop._hand_out, "take", broken)
    with pytest.raises(RuntimeError, match="the books are wrong"):
        llm.generate(PROMPT, TEN)


def test_without_bytes_nothing_is_kept(make_llm: MakeLLM) -> None:
    llm = make_llm(crash_report_bytes=0)
    llm.generate(PROMPT, TEN)
    assert llm.scheduler.recorded() is None
