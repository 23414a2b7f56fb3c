"""Groups of sequences that share a prefix: the same blocks, all of them before the first query, and no grouping saves more."""

from collections.abc import Iterator

import numpy as np
import pytest

from blocktable import InvalidInputError, Scheduler, WrongStepError, _core
from blocktable.testing import Driver

CONFIG = {"num_blocks": 200, "block_size": 4, "vocab_size": 50_021, "max_model_len": 64, "max_num_seqs": 6}
ROOT = list(range(100, 140))
Group = tuple[tuple[int, ...], int]


def groups_of(plan: _core.Plan, **options: int) -> list[Group]:
    members, starts, blocks = (array.tolist() for array in plan.prefix_groups(**options))
    assert starts[0] == 0
    assert starts[-1] == len(members)
    return [(tuple(members[a:b]), shared) for a, b, shared in zip(starts[:-1], starts[1:], blocks, strict=True)]


def prefixes_of(plan: _core.Plan) -> list[list[int]]:
    """Of each sequence the blocks that end before its first query, from the plan's arrays."""
    first_queries = plan.positions[plan.query_starts[:-1]].tolist()
    size = CONFIG["block_size"]
    return [
        plan.block_tables[0, row, : first // size].tolist() for row, first in zip(plan.seq_slots, first_queries, strict=True)
    ]


def partitions(items: list[int]) -> Iterator[list[list[int]]]:
    if not items:
        yield []
        return
    head, *rest = items
    for partition in partitions(rest):
        yield [[head], *partition]
        for at, part in enumerate(partition):
            yield [*partition[:at], [head, *part], *partition[at + 1 :]]


def agreed(prefixes: list[list[int]]) -> int:
    return next((at for at, ids in enumerate(zip(*prefixes)) if len(set(ids)) > 1), min(map(len, prefixes)))


def saved(part: list[list[int]], min_blocks: int) -> int:
    shared = agreed(part)
    return (len(part) - 1) * shared if shared >= min_blocks else 0


def check(plan: _core.Plan, min_blocks: int) -> int:
    """How many groups there are, each of them sound, and together as good as the best of all groupings."""
    prefixes, groups = prefixes_of(plan), groups_of(plan, min_blocks=min_blocks)
    seen = [member for members, _ in groups for member in members]
    assert len(seen) == len(set(seen)), "a sequence is in two groups"
    for members, shared in groups:
        assert len(members) >= 2
        assert list(members) == sorted(members)
        assert shared >= min_blocks
        assert shared == agreed([prefixes[member] for member in members])
    best = max(
        sum(saved([prefixes[i] for i in part], min_blocks) for part in partition)
        for partition in partitions(list(range(plan.num_seqs)))
    )
    assert sum((len(members) - 1) * shared for members, shared in groups) == best
    return len(groups)


def play(seed: int) -> int:
    """Prompts that branch off each other, decoding and prefilling together; the most groups of a plan."""
    rng = np.random.default_rng(seed)
    driver = Driver(CONFIG)
    asked, most = [ROOT], 0
    for turn in range(24):
        if turn % 2 == 0:
            earlier = asked[rng.integers(len(asked))]
            prompt = earlier[: rng.integers(4, len(earlier) + 1)] + rng.integers(0, 99, rng.integers(1, 9)).tolist()
            asked.append(prompt[:48])
            driver.submit(asked[-1], max_tokens=int(rng.integers(2, 12)))
        plan = driver.plan()
        if plan.num_seqs:
            most = max(most, *(check(plan, min_blocks) for min_blocks in (1, 3)))
            driver.commit(*driver.forward())
    return most


def play_some() -> None:
    assert max(play(seed) for seed in range(6)) >= 2


def test_no_other_grouping_saves_more_reads():
    play_some()


def test_a_large_group_of_a_short_prefix_and_a_small_one_of_a_long_one_are_told_apart():
    """Six share two blocks; two of these share nine: apart these two save more, though all six could be one group."""
    scheduler = Scheduler(**CONFIG)
    scheduler.submit([*ROOT, 1], max_tokens=9)
    plan = scheduler.plan(0)
    scheduler.commit(plan.step, np.zeros(1, np.int64), np.arange(2), 0)
    for tail in range(2):
        scheduler.submit([*ROOT[:38], tail], max_tokens=9)
    for tail in range(3):
        scheduler.submit([*ROOT[:8], tail], max_tokens=9)
    plan = scheduler.plan(0)
    assert plan.seq_lens.tolist() == [42, 39, 39, 9, 9, 9]
    assert groups_of(plan) == [((3, 4, 5), 2), ((0, 1, 2), 9)] or groups_of(plan) == [((0, 1, 2), 9), ((3, 4, 5), 2)]
    assert groups_of(plan, min_blocks=3) == [((0, 1, 2), 9)]
    assert groups_of(plan, min_blocks=10) == []


def test_groups_with_a_window_share_nothing_that_is_told():
    scheduler = Scheduler(**CONFIG, groups=[None, 8])
    for tail in range(2):
        scheduler.submit([*ROOT[:20], tail], max_tokens=4)
    plan = scheduler.plan(0)
    scheduler.commit(plan.step, np.zeros(len(plan.sample_rows), np.int64), np.arange(len(plan.sample_rows) + 1), 0)
    plan = scheduler.plan(0)
    assert groups_of(plan, group=0) == [((0, 1), 5)]
    assert groups_of(plan, group=1) == []


def play_stale() -> None:
    """One of three is taken back after the plan, and is in no group any more."""
    scheduler = Scheduler(**CONFIG)
    first, *_ = (scheduler.submit([*ROOT[:20], tail], max_tokens=4) for tail in range(3))
    plan = scheduler.plan(0)
    scheduler.commit(plan.step, np.zeros(len(plan.sample_rows), np.int64), np.arange(len(plan.sample_rows) + 1), 0)
    plan = scheduler.plan(0)
    assert groups_of(plan) == [((0, 1, 2), 5)]
    scheduler.truncate(first, 20)
    assert groups_of(plan) == [((1, 2), 5)]
    scheduler.abort(first)
    assert groups_of(plan) == [((1, 2), 5)]


def test_who_was_taken_back_since_the_plan_is_in_no_group():
    play_stale()


def play_shared_in_flight() -> None:
    """The second names blocks that the first writes in the same step: rows of the step itself are in no shared prefix."""
    scheduler = Scheduler(**CONFIG)
    for tail in range(2):
        scheduler.submit([*ROOT[:20], tail], max_tokens=4)
    plan = scheduler.plan(0)
    tables = plan.block_tables[0].take(plan.seq_slots, axis=0)
    assert (tables[0, :5] == tables[1, :5]).all(), "they share"
    assert groups_of(plan) == []


def test_what_the_step_itself_writes_is_in_no_group():
    play_shared_in_flight()


@pytest.mark.mutant
@pytest.mark.parametrize(
    ("fault", "play"),
    [("prefix_too_long", play_shared_in_flight), ("prefix_deepest_only", play_some), ("prefix_of_stale", play_stale)],
)
def test_a_wrong_group_is_found(fault, play):
    _core.set_mutant(fault)
    try:
        with pytest.raises(AssertionError):
            play()
    finally:
        _core.set_mutant(None)


def test_bad_questions_are_refused():
    scheduler = Scheduler(**CONFIG)
    scheduler.submit(ROOT, max_tokens=4)
    plan = scheduler.plan(0)
    with pytest.raises(InvalidInputError, match=r"group=1.*below 1"):
        plan.prefix_groups(group=1)
    with pytest.raises(InvalidInputError, match=r"min_blocks=0.*at least 1"):
        plan.prefix_groups(min_blocks=0)
    scheduler.commit(plan.step, np.zeros(1, np.int64), np.arange(2), 0)
    with pytest.raises(WrongStepError):
        plan.prefix_groups()
