"""Promise: Ctrl-C, or a termination, ends the command cleanly: everything freed and said so, the exit code, no traceback."""

import os
import signal
import sys
from pathlib import Path

import pytest

from blocktable.cli.interrupts import Interrupted, interruptible

from .conftest import start

pytestmark = pytest.mark.skipif(os.name != "posix", reason="signals of POSIX")

LONG = ["--max-tokens", "90000", "--ignore-eos", "--num-blocks", "20000", "--no-self-check", "--num-threads", "1"]


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_while_answers_stream_frees_everything(number: signal.Signals, code: int, model_dir: Path) -> None:
    process = start("generate", "--model", str(model_dir), "one", "two", "three", *LONG)
    assert process.stdout is not None
    try:
        assert process.stdout.readline() == "[1/3] one\n"
        assert process.stdout.read(10), "an answer has begun"
        process.send_signal(number)
        _, err = process.communicate(timeout=120)
    finally:
        process.kill()
    assert process.returncode == code, err
    assert "Traceback" not in err
    assert err.splitlines()[-1] == "interrupted: 3 requests aborted, 19999 of 19999 KV blocks free: all freed"


@pytest.mark.timeout(300)
def test_a_signal_while_the_model_is_loaded_ends_it_too(model_dir: Path) -> None:
    process = start("generate", "--model", str(model_dir), "one", *LONG)
    assert process.stderr is not None
    try:
        assert "reading its configuration" in process.stderr.readline()
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=120)
    finally:
        process.kill()
    assert process.returncode == 130, err
    assert "Traceback" not in err
    assert err.splitlines()[-1].startswith("interrupted")


def test_the_first_signal_raises_and_the_second_does_not_cut_the_clean_up_short() -> None:
    cleaned = []
    before = signal.getsignal(signal.SIGINT)

    def be_interrupted_twice() -> None:
        try:
            os.kill(os.getpid(), signal.SIGINT)
            for _ in range(1000):  # a signal is handled at the next loop or call
                pass
        finally:
            os.kill(os.getpid(), signal.SIGINT)
            cleaned.append(True)

    with pytest.raises(Interrupted) as caught, interruptible():
        be_interrupted_twice()
    assert caught.value.exit_code == 130
    assert cleaned == [True]
    assert signal.getsignal(signal.SIGINT) is before


@pytest.mark.timeout(300)
def test_a_reader_that_leaves_is_no_fault(model_dir: Path) -> None:
    """`blocktable generate … | head -1`"""
    process = start("generate", "--model", str(model_dir), "one", *LONG)
    assert process.stdout is not None
    assert process.stderr is not None
    try:
        process.stdout.readline()
        process.stdout.close()
        process.wait(timeout=120)
        err = process.stderr.read()
    finally:
        process.kill()
        process.stderr.close()
    assert process.returncode == 141, err
    assert "Traceback" not in err
    assert "Exception ignored" not in err


def test_only_the_command_line_names_signal_handlers() -> None:
    """No other file of the package installs one, but the main of the process that a server starts."""
    import blocktable

    root = Path(str(blocktable.__file__)).parent
    found = sorted(
        str(file.relative_to(root)) for file in root.rglob("*.py") if "signal.signal(" in file.read_text(encoding="utf-8")
    )
    assert found == [os.path.join("cli", "interrupts.py"), os.path.join("server", "engine_process.py")]
    assert sys.modules["blocktable"] is blocktable
