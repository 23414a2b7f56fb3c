"""Drafts through Python: any drafter brings the text that comes without one, in fewer steps if it is good.

Before: `Scheduler.propose`. After: the oracle model answers every sample row; what `Commit.dropped` does not name counts.
"""

from collections.abc import Callable

import numpy as np
import pytest

from blocktable import InvalidInputError, Scheduler
from blocktable.testing.audit import check_drained
from blocktable.testing.oracle import OracleModel

SIZES = {"num_blocks": 64, "block_size": 4, "vocab_size": 1009}
MOST = 5
Drafter = Callable[[list[int], int], list[int]]
"""What was said so far, and what comes next -> drafts."""


def ints(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.int64)


def run(drafter: Drafter | None, said: list[int], max_tokens: int = 24) -> tuple[list[int], Scheduler]:
    """The outputs of one request, for which `drafter` proposes before every plan."""
    scheduler = Scheduler(**SIZES, max_model_len=80, max_draft_tokens=MOST)
    oracle = OracleModel(**SIZES)
    scheduler.submit(list(range(10)), max_tokens=max_tokens)
    outputs: list[int] = []
    while scheduler.num_running or scheduler.num_waiting:
        if drafter and outputs:
            drafts = drafter(outputs, said[len(outputs)] if len(outputs) < len(said) else 0)
            scheduler.propose(ints(0), ints(0, len(drafts)), ints(*drafts))
        plan = scheduler.plan(0)
        oracle.take_over(plan)
        ids, starts = oracle.step(plan)
        done = scheduler.commit(plan.step, ids, starts, 0)
        scheduler.audit()
        outputs += np.delete(ids, done.dropped).tolist()
    check_drained(scheduler)
    return outputs, scheduler


def test_every_drafter_brings_the_same_text() -> None:
    said, plain = run(None, [])
    drafters: list[tuple[Drafter, int, int]] = [
        (lambda before, _: said[len(before) :][:MOST], 19, 1 + 4),
        (lambda before, _: [0] * MOST, 0, 24),
        (lambda before, token: [token, token], 12, 13),
    ]
    for drafter, _, steps in drafters:
        outputs, scheduler = run(drafter, said)
        assert outputs == said
        stats = scheduler.stats()
        assert stats["accepted_drafts"] == 24 - stats["steps"]
        assert stats["steps"] <= steps
    assert plain.stats()["steps"] == 24


@pytest.mark.parametrize(
    ("field", "call"),
    [
        ("seq_slots", (ints(1), ints(0, 0), ints())),
        ("seq_slots", (ints(-1), ints(0, 0), ints())),
        ("seq_slots", (ints(0, 0), ints(0, 0, 0), ints())),
        ("starts", (ints(0), ints(0), ints())),
        ("starts", (ints(0), ints(0, MOST + 1), ints(*range(MOST + 1)))),
        ("token_ids", (ints(0), ints(0, 1), ints(1009))),
        ("token_ids", (ints(0), ints(0, 2), ints(7))),
    ],
)
def test_a_bad_proposal_is_refused_by_its_field(field: str, call: tuple[np.ndarray, ...]) -> None:
    scheduler = Scheduler(**SIZES, max_model_len=80, max_draft_tokens=MOST)
    scheduler.submit([1, 2, 3], max_tokens=4)
    scheduler.plan(0)
    with pytest.raises(InvalidInputError) as refusal:
        scheduler.propose(*call)
    assert refusal.value.field == field
    scheduler.audit()
