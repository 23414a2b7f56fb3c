"""The plan's arrays are views: no copy, of the stated shape and dtype, and unchanged until their step ends."""

import gc

import numpy as np
import pytest

PROMPTS = [list(range(10, 15)), list(range(20, 26)), list(range(30, 37))]
ARRAYS = {
    "seq_slots": np.int32,
    "query_starts": np.int32,
    "seq_lens": np.int32,
    "token_ids": np.int32,
    "positions": np.int32,
    "token_sources": np.int32,
    "slot_mapping": np.int64,
    "block_tables": np.int32,
    "dirty": np.int32,
    "dirty_ids": np.int32,
    "copies": np.int32,
    "sample_rows": np.int32,
    "sample_requests": np.int64,
    "ended": np.int64,
    "preempted": np.int64,
    "admitted": np.int64,
}


def address(array):
    return array.__array_interface__["data"][0]


@pytest.fixture
def busy(scheduler):
    """Three requests of 5, 6 and 7 tokens, no two with a common beginning."""
    for prompt in PROMPTS:
        scheduler.submit(prompt, max_tokens=4)
    return scheduler


def test_shapes_and_dtypes_are_the_documented_ones(busy):
    plan = busy.plan(0)
    shapes = {
        "seq_slots": (3,),
        "query_starts": (4,),
        "seq_lens": (3,),
        "token_ids": (18,),
        "positions": (18,),
        "token_sources": (18,),
        "slot_mapping": (1, 18),
        "block_tables": (1, 8, 32),
        "copies": (0, 4),
        "sample_rows": (3,),
        "sample_requests": (3,),
        "ended": (0, 2),
        "preempted": (0, 2),
        "admitted": (3, 3),
    }
    assert {name: getattr(plan, name).shape for name in shapes} == shapes
    assert {name: getattr(plan, name).dtype for name in ARRAYS} == {name: np.dtype(dtype) for name, dtype in ARRAYS.items()}
    assert plan.dirty.shape[1] == 4
    assert plan.dirty_ids.shape == (plan.dirty[:, 3].sum(),)
    assert (plan.num_seqs, plan.num_tokens) == (3, 18)


def test_arrays_of_several_groups_have_a_line_for_each_and_null_entries_behind_a_window(make_scheduler):
    """[G, T] slots and [G, rows, columns] tables; the changes carry their group, those to null too."""
    scheduler = make_scheduler(groups=[None, 6])
    scheduler.submit(PROMPTS[2], max_tokens=9)
    device = None
    for _ in range(9):
        plan = scheduler.plan(0)
        tables = plan.block_tables
        device = np.zeros_like(tables) if device is None else device
        start = 0
        for group, row, column, count in plan.dirty.tolist():
            device[group, row, column : column + count] = plan.dirty_ids[start : start + count]
            start += count
        assert np.array_equal(device, tables)
        assert plan.slot_mapping.shape == (2, plan.num_tokens)
        row, position, block = plan.seq_slots[0], int(plan.positions[0]), int(plan.positions[-1]) // 4
        assert (plan.slot_mapping[:, -1] // 4).tolist() == tables[:, row, block].tolist()
        hidden = max(0, position + 1 - 6) // 4
        assert not tables[1, row, :hidden].any()
        assert tables[0, row, : block + 1].all()
        assert tables[1, row, hidden : block + 1].all()
        scheduler.commit(plan.step, np.array([7]), np.array([0, 1]), 0)
    assert hidden == 2


@pytest.mark.parametrize("name", ARRAYS)
def test_an_array_read_twice_is_the_same_memory(busy, name):
    plan = busy.plan(0)
    first, second = getattr(plan, name), getattr(plan, name)
    if first.size:
        assert address(first) == address(second)
        assert np.shares_memory(first, second)
        assert not first.flags.owndata


def test_the_arrays_of_a_plan_say_what_is_to_be_run(busy):
    plan = busy.plan(0)
    assert plan.query_starts.tolist() == [0, 5, 11, 18]
    assert plan.token_ids.tolist() == [token for prompt in PROMPTS for token in prompt]
    assert plan.positions.tolist() == [*range(5), *range(6), *range(7)]
    assert plan.sample_rows.tolist() == [4, 10, 17]
    for i, length in enumerate((5, 6, 7)):
        blocks = plan.block_tables[0, plan.seq_slots[i], : (length + 3) // 4]
        slots = [int(blocks[position // 4]) * 4 + position % 4 for position in range(length)]
        assert plan.slot_mapping[0, plan.query_starts[i] : plan.query_starts[i + 1]].tolist() == slots


def test_views_hold_what_they_held_until_their_step_ends(busy, answer):
    for _ in range(3):
        plan = busy.plan(0)
        views = {name: getattr(plan, name) for name in ARRAYS}
        copies = {name: view.copy() for name, view in views.items()}
        busy.submit([1, 2, 3], max_tokens=2)
        busy.abort(busy.submit([1, 2, 3], max_tokens=2))
        busy.stats()
        busy.audit()
        for name in ARRAYS:
            np.testing.assert_array_equal(views[name], copies[name], err_msg=name)
        answer(busy, plan)


def test_views_stay_readable_when_scheduler_and_plan_are_gone(make_scheduler):
    """Old views may show newer numbers, but never freed memory."""
    scheduler = make_scheduler()
    scheduler.submit(list(range(9)), max_tokens=1)
    plan = scheduler.plan(0)
    view = plan.token_ids
    del scheduler, plan
    gc.collect()
    assert view.tolist() == list(range(9))


def test_nothing_to_run_is_a_plan_of_no_sequences(scheduler):
    plan = scheduler.plan(0)
    assert (plan.num_seqs, plan.num_tokens) == (0, 0)
    assert plan.sample_rows.shape == (0,)
    assert plan.query_starts.tolist() == [0]
    scheduler.submit([1], max_tokens=1)
    assert scheduler.plan(0).num_seqs == 1


def test_what_a_commit_ended_comes_with_it_and_with_the_next_plan(scheduler, answer):
    request = scheduler.submit([1, 2, 3], max_tokens=1)
    done = answer(scheduler, scheduler.plan(0))
    assert done.ended[:, 0].tolist() == [request]
    assert scheduler.plan(0).ended.tolist() == done.ended.tolist()
