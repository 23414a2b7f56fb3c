"""Promise: a request can be asked what happened to it and what it waits for, in words and as data, also after its end; every
reason has a stable code, and a plan that cannot go on says who waits for what."""

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from blocktable import Commit, Plan, Scheduler, StalledError, UnknownRequestError, _core

from .conftest import MakeScheduler

Answer = Callable[[Scheduler, Plan], Commit]
DOCUMENT = Path(__file__).parents[2] / "docs" / "reasons.md"


def drain(scheduler: Scheduler, answer: Answer) -> None:
    while (plan := scheduler.plan(5_000)).num_seqs:
        answer(scheduler, plan)


def two_in_a_pool_of_three(make_scheduler: MakeScheduler) -> tuple[Scheduler, int]:
    """A scheduler with three usable blocks, two of them held, and a request that waits for two."""
    scheduler = make_scheduler(num_blocks=4)
    scheduler.submit(list(range(8)), max_tokens=2, now_us=1_000)
    return scheduler, scheduler.submit(list(range(10, 18)), max_tokens=1, now_us=2_000)


def test_a_wait_is_explained_while_it_lasts_and_after_the_end(make_scheduler: MakeScheduler, answer: Answer) -> None:
    scheduler, waits = two_in_a_pool_of_three(make_scheduler)
    answer(scheduler, scheduler.plan(3_000))
    told = scheduler.explain(waits)
    assert (told["place"], told["forgotten"]) == ("waiting", 0)
    assert told["waits_for"] == {
        "reason": "out_of_blocks",
        "code": 1,
        "kind": "wait",
        "numbers": {"needed": 2, "free": 1, "promised": 0},
        "words": "waits for 2 KV blocks: 1 are free, 0 of them promised to others",
    }
    drain(scheduler, answer)
    told = scheduler.explain(waits)
    assert (told["place"], told["waits_for"]) == ("ended", None)
    names = [record["reason"] for record in told["records"]]
    assert names[:3] == ["submitted", "behind_head", "out_of_blocks"]
    assert names[-1] == "finished_length"
    assert told["records"][0]["at_us"] == 2_000
    assert told["text"].startswith(f"request {waits} (ended)\n  +0.000000 s: was submitted: 8 tokens, 1 outputs at most")
    with pytest.raises(UnknownRequestError):
        scheduler.explain(12345)


def test_every_reason_is_counted_and_heard(make_scheduler: MakeScheduler, answer: Answer) -> None:
    scheduler, _ = two_in_a_pool_of_three(make_scheduler)
    assert scheduler.take_notes() is None
    scheduler.listen_to_notes(100)
    before = sum(count for name, count in scheduler.stats().items() if name.startswith("reason_"))
    drain(scheduler, answer)
    after = sum(count for name, count in scheduler.stats().items() if name.startswith("reason_"))
    heard = scheduler.take_notes()
    assert heard is not None
    lines, lost = heard
    notes = [json.loads(line) for line in lines.splitlines()]
    assert (len(notes), lost) == (after - before, 0)
    assert {note["reason"] for note in notes} >= {"admitted", "out_of_blocks", "finished_length"}
    assert scheduler.take_notes() == ("", 0)
    scheduler.listen_to_notes(0)
    assert scheduler.take_notes() is None


def test_the_document_lists_every_reason() -> None:
    rows = re.findall(r"^\| (\d+) \| `(\w+)` \| (\w+) \| ([^|]*) \|", DOCUMENT.read_text(), re.MULTILINE)
    listed = [(int(code), name, kind, tuple(re.findall(r"\w+", numbers))) for code, name, kind, numbers in rows]
    assert listed == list(_core.REASONS)
    counted = {name.removeprefix("reason_") for name in Scheduler(**SIZES).stats() if name.startswith("reason_")}
    assert counted == {name for _, name, _, _ in _core.REASONS}


SIZES = {"num_blocks": 4, "block_size": 4, "vocab_size": 100, "max_model_len": 64}


@pytest.mark.mutant
def test_a_stall_names_the_request_and_every_number(make_scheduler: MakeScheduler, answer: Answer) -> None:
    scheduler = make_scheduler(num_blocks=4)
    number = scheduler.submit(list(range(10)), max_tokens=9)
    answer(scheduler, scheduler.plan(0))
    _core.set_mutant("never_ends_alone")
    try:
        with pytest.raises(StalledError) as caught:
            drain(scheduler, answer)
    finally:
        _core.set_mutant(None)
    stall = caught.value
    assert (stall.request_id, stall.is_running, stall.needed, stall.free) == (number, True, 1, 0)
    assert (stall.promised, stall.parked, stall.pinned, stall.held_by) == (0, 0, 0, [(number, 3)])
    assert stall.waits_for is not None
    assert (stall.waits_for["reason"], stall.waits_for["numbers"]["needed"]) == ("no_victim", 1)
    assert "request 1 cannot move" in str(stall)
