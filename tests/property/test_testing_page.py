"""docs/testing.md is true: its code runs, its planted bug is found, and what it prints is what it says."""

import contextlib
import io
import re
from pathlib import Path
from typing import Any

from blocktable.testing import Allocator

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs/testing.md").read_text(encoding="utf-8")


def run_page() -> tuple[dict[str, Any], str]:
    """Run the blocks one after the other; what they define, and what they print."""
    names: dict[str, Any] = {}
    told = io.StringIO()
    with contextlib.redirect_stdout(told):
        for number, block in enumerate(re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)):
            exec(compile(block, f"docs/testing.md, block {number}", "exec"), names)
    return names, told.getvalue()


def test_the_page_finds_its_planted_bug_and_prints_it_as_it_says() -> None:
    names, told = run_page()
    (shown,) = re.findall(r"```text\n(.*?)```", PAGE, re.DOTALL)
    assert told == shown
    assert names["bug"].kind == "A5"
    assert len(names["bug"].calls) <= 6
    assert hasattr(names["TestAllocator"], "runTest")


def test_the_page_tells_all_of_the_protocol() -> None:
    told = set(re.findall(r"`(\w+)[(`]", PAGE))
    wanted = {name for name in vars(Allocator) if not name.startswith("_")}
    assert wanted <= told


def test_the_page_tells_every_promise_of_the_watch() -> None:
    source = (ROOT / "python/blocktable/testing/watch.py").read_text(encoding="utf-8")
    promises = set(re.findall(r'_broken\(\s*"(\w+)"', source))
    told = set(re.findall(r"^\| `?(\w+)`? \|", PAGE, re.MULTILINE))
    assert promises <= told
    assert told - promises == {"promise", "method"}
