"""The audit itself: each of A1 to A8 has a planted fault that `Scheduler.audit` names, with no other check around it."""

import random
from contextlib import suppress

import numpy as np
import pytest

from blocktable import _core
from blocktable._core import Scheduler
from blocktable.errors import AuditError, BlocktableError, StalledError
from tests.faults.promises import is_panic

CAUGHT_BY = {
    "A1": ("ignore_promises", "lost_block"),
    "A2": ("skip_ref_on_hit", "leak_block_on_finish", "free_in_flight"),
    "A3": ("one_way_link",),
    "A4": ("orphan_entry",),
    "A5": ("write_shared", "keep_key_on_reuse", "publish_at_plan"),
    "A6": ("abort_waiting_leaks", "preempted_to_tail"),
    "A7": ("count_one_too_many",),
    "A8": ("stall_silently", "never_ends_alone"),
}
"""Invariant -> planted faults that break it. The audit must name it; for A8 a stall report of `plan` is as good."""

PAIRS = [pytest.param(check, mutant, id=f"{check}-{mutant}") for check, mutants in CAUGHT_BY.items() for mutant in mutants]


def audited_run(seed: int) -> None:
    """A plain caller: requests, aborts and failed steps at random, the core's own audit after every call, and nothing else."""
    rng = random.Random(seed)
    scheduler = Scheduler(
        num_blocks=rng.choice((6, 9, 14)),
        block_size=rng.choice((2, 4)),
        vocab_size=1_000,
        max_model_len=40,
        max_num_seqs=4,
        max_num_batched_tokens=rng.choice((6, 20)),
        max_waiting=8,
        long_prefill_threshold=rng.choice((0, 3)),
    )
    root = [rng.randrange(1_000) for _ in range(16)]
    live: list[int] = []
    for _ in range(120):
        if rng.random() < 0.5:
            with suppress(BlocktableError):
                live.append(scheduler.submit([*root[: rng.randint(1, 16)], rng.randrange(3)], max_tokens=rng.randint(1, 6)))
            scheduler.audit()
        plan = scheduler.plan(0)
        scheduler.audit()
        if live and rng.random() < 0.2:
            scheduler.abort(rng.choice(live))
            scheduler.audit()
        if plan.num_seqs == 0:
            continue
        count, step = len(plan.sample_rows), plan.step
        if rng.random() < 0.1:
            scheduler.fail(step)
        else:
            ids = np.array([rng.randrange(1_000) for _ in range(count)], np.int64)
            scheduler.commit(step, ids, np.arange(count + 1), 0)
        scheduler.audit()


def test_the_audit_is_silent_while_nothing_is_wrong() -> None:
    """The control of the table below."""
    for seed in range(40):
        audited_run(seed)


@pytest.mark.mutant
@pytest.mark.parametrize(("check", "mutant"), PAIRS)
def test_the_audit_names_what_a_planted_fault_breaks(check: str, mutant: str) -> None:
    caught: dict[str, int] = {}
    for seed in range(40):
        _core.set_mutant(mutant)
        try:
            audited_run(seed)
        except AuditError as error:
            caught[error.check] = caught.get(error.check, 0) + 1
        except StalledError:
            caught["A8"] = caught.get("A8", 0) + 1
        except BaseException as error:
            if not is_panic(error):
                raise
            caught["panic"] = caught.get("panic", 0) + 1
        finally:
            _core.set_mutant(None)
    print(f"{mutant}: {caught}")
    assert check in caught
