"""docs/scheduler.md is true: its loop runs to the end of its request, and the options that it names exist."""

import inspect
import re
from pathlib import Path

from blocktable import Scheduler

PAGE = (Path(__file__).resolve().parents[2] / "docs/scheduler.md").read_text(encoding="utf-8")
[LOOP] = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)


def test_the_loop_of_the_page_answers_its_request():
    names: dict[str, object] = {}
    exec(compile(LOOP, "docs/scheduler.md", "exec"), names)
    scheduler = names["scheduler"]
    assert isinstance(scheduler, Scheduler)
    assert scheduler.stats()["finished"] == 1
    scheduler.audit()


def test_every_option_that_the_page_names_exists():
    """Names alone or with a value in code; whatever else stands in code there is named here."""
    core = {"abort", "finish", "submit", "plan", "commit", "stats", "dirty", "token_sources", "domain", "adapter", "media"}
    others = core | {"sample_rows", "dropped", "drafts_in_flight", "drafted_tokens", "accepted_drafts"}
    others |= {"admitted", "preempted", "fork"}
    policies = {"fcfs", "priority", "fair", "deadline", "prefix"}
    named = set(re.findall(r"`([a-z_]+)(?:=[^`]*)?`", PAGE)) - others - policies
    known = set(inspect.signature(Scheduler).parameters) | set(inspect.signature(Scheduler.submit).parameters)
    assert "watermark" in named
    assert named - known == {"retry_after_us"}
