"""Block tables on a device are the plan's, whatever changed and whichever plans were not followed."""

import random
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch", reason="needs the extra `engine`")

import torch

from blocktable import Scheduler
from blocktable._core import Plan
from blocktable.model import device_tables
from blocktable.model.device_tables import DeviceTables
from blocktable.model.parcel import Parcel, packed


def assert_equal(tables: DeviceTables, plan: Plan) -> None:
    """The rows of the step, as far as it sees."""
    for group in range(len(plan.block_tables)):
        for row, length in zip(plan.seq_slots.tolist(), plan.seq_lens.tolist()):
            columns = -(-length // 4)
            found = tables.tables[group, row, :columns].tolist()
            assert found == plan.block_tables[group, row, :columns].tolist(), f"step {plan.step}, group {group}, row {row}"


def play(draw: random.Random, steps: int = 120) -> int:
    """Requests that come, grow, are preempted and end, in two groups, one with a window; returns how many were compared."""
    scheduler = Scheduler(
        num_blocks=24,
        block_size=4,
        vocab_size=50,
        max_model_len=48,
        max_num_seqs=5,
        max_num_batched_tokens=16,
        groups=[None, 6],
    )
    tables, followed = DeviceTables((2, 5, 12), torch.device("cpu")), 0
    for _ in range(steps):
        if draw.random() < 0.4:
            prompt = [draw.randrange(50) for _ in range(draw.randint(1, 20))]
            scheduler.submit(prompt, max_tokens=draw.randint(1, 20), now_us=0)
        plan = scheduler.plan(now_us=0)
        if not plan.num_seqs:
            continue
        if draw.random() < 0.1:
            scheduler.fail(plan.step)
            continue
        if draw.random() < 0.5:
            tables.follow(plan)
        else:
            tables.write(tables.changes(plan))
            if draw.random() < 0.1:  # interrupted: what it changed may not have been written
                tables.flat.zero_()
                scheduler.fail(plan.step)
                continue
            tables.has_followed(plan)
        assert_equal(tables, plan)
        followed += 1
        ids = np.array([draw.randrange(50) for _ in plan.sample_rows], dtype=np.int64)
        scheduler.commit(plan.step, ids, np.arange(len(ids) + 1), now_us=0)
    return followed


def test_tables_on_a_device_are_those_of_the_plan(rng: random.Random) -> None:
    assert sum(play(rng) for _ in range(8)) > 400


def ignores_gaps(self: DeviceTables, plan: Plan) -> Any:
    return device_tables._flattened(plan.dirty, plan.dirty_ids, self._shape)


def trusts_interrupted_plans(self: DeviceTables, plan: Plan) -> Any:
    found = CHANGES(self, plan)
    self._step = plan.step
    return found


def first_counts(dirty: Any, ids: Any, shape: Any) -> Any:
    places, values = FLATTENED(dirty[:1], ids[: dirty[:1, 3].sum()], shape)
    return places, values


CHANGES, FLATTENED = DeviceTables.changes, device_tables._flattened
FAULTS = [
    (DeviceTables, "changes", ignores_gaps),
    (DeviceTables, "changes", trusts_interrupted_plans),
    (device_tables, "_flattened", first_counts),
]


@pytest.mark.parametrize(("owner", "name", "fault"), FAULTS, ids=[fault.__name__ for *_, fault in FAULTS])
def test_a_planted_fault_is_caught(
    owner: Any, name: str, fault: Any, rng: random.Random, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(owner, name, fault)
    with pytest.raises(AssertionError, match="step"):
        play(rng, steps=2000)


def test_of_two_changes_of_a_place_the_last_counts() -> None:
    dirty = np.array([[0, 1, 2, 2], [1, 0, 0, 1], [0, 1, 3, 1]], np.int32)
    places, ids = device_tables._flattened(dirty, np.array([7, 8, 9, 5], np.int32), (2, 3, 4))
    assert dict(zip(places.tolist(), ids.tolist())) == {6: 7, 7: 5, 12: 9}
    assert len(places) == 3


def test_a_parcel_brings_every_array_whole_and_to_the_same_place() -> None:
    kinds = [((3,), np.int64), ((2, 5), np.int32), ((0,), np.int32), ((1,), np.int64)]
    parcel, places = Parcel(kinds, torch.device("cpu")), set()
    for round_ in range(2):
        for number, array in enumerate(parcel.open()):
            array[...] = np.arange(array.size).reshape(array.shape) + 100 * number + round_
        tensors = parcel.send()
        for number, (tensor, (shape, dtype)) in enumerate(zip(tensors, kinds)):
            assert tensor.numpy().dtype == dtype
            assert tensor.tolist() == (np.arange(tensor.numel()).reshape(shape) + 100 * number + round_).tolist()
            assert tensor.data_ptr() % 16 == 0 or not tensor.numel()
        places.add(tuple(tensor.data_ptr() for tensor in tensors))
    assert len(places) == 1


def test_on_a_cpu_arrays_are_not_copied() -> None:
    array = np.arange(3)
    (tensor,) = packed([array], torch.device("cpu"))
    array[0] = 9
    assert tensor.tolist() == [9, 1, 2]
