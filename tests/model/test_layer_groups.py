"""Promises: layers of one group see the same rows; a block is as large as the largest group needs; padding is small and
counted; what the groups keep never overlaps in memory."""

import re

import numpy as np
import pytest
import torch

from blocktable.errors import InvalidInputError, UnsupportedModelError
from blocktable.model.geometry import KVGeometry, LayerShape
from blocktable.model.kv_memory import KVMemory
from blocktable.model.kv_sizing import size_kv
from blocktable.model.layer_groups import MOST_PADDING, group_layers

CPU = torch.device("cpu")


def mixed(windows: list[int | None], shape: tuple[int, int, int] = (2, 8, 8)) -> KVGeometry:
    return KVGeometry(tuple(LayerShape(*shape, window) for window in windows), torch.float32)


@pytest.mark.parametrize(
    ("windows", "groups", "padding"),
    [
        ([None] * 30, [(None, 30)], 0),
        ([4096] * 32, [(4096, 32)], 0),  # mistral
        ([512, None] * 13, [(None, 13), (512, 13)], 0),  # gemma2
        ([512, 512, 512, 512, 512, None] * 4 + [512, 512], [(None, 4), *[(512, 4)] * 5, (512, 2)], 2 / 28),  # gemma3, 26 layers
        ([128] + [None] * 6, [*[(None, 2)] * 3, (128, 1)], 1 / 8),
        ([8, 8, 16, 16, None, None], [(None, 2), (8, 2), (16, 2)], 0),
    ],
)
def test_the_layers_are_split_by_window_with_few_groups_and_little_padding(windows, groups, padding):
    geometry = group_layers(mixed(windows), 1 << 17, "a model")
    assert [(group.window, len(group.layers)) for group in geometry.groups] == groups
    assert geometry.padding == pytest.approx(padding)
    assert sorted(layer for group in geometry.groups for layer in group.layers) == list(range(len(windows)))
    for group in geometry.groups:
        assert {windows[layer] for layer in group.layers} == {group.window}
        assert list(group.layers) == sorted(group.layers)
    for layer in range(len(windows)):
        assert layer in geometry.groups[geometry.group_of(layer)].layers


def test_a_window_that_no_sequence_outgrows_is_none():
    geometry = mixed([64, None])
    assert [group.window for group in group_layers(geometry, 64, "a model").groups] == [None]
    assert [group.window for group in group_layers(geometry, 65, "a model").groups] == [None, 64]


def test_layers_of_different_shapes_fill_blocks_of_one_size():
    """Four narrow layers with a window, two of twice their size without."""
    layers = tuple([LayerShape(1, 8, 8, 16)] * 4 + [LayerShape(2, 8, 8)] * 2)
    geometry = group_layers(KVGeometry(layers, torch.float32), 512, "a model")
    assert [group.layers for group in geometry.groups] == [(4, 5), (0, 1, 2, 3)]
    assert geometry.padding == 0
    assert geometry.elements_per_block(16) == 16 * 64


def test_padding_is_no_more_than_it_must_be():
    for sliding in range(1, 40):
        for full in range(1, 10):
            geometry = group_layers(mixed([32] * sliding + [None] * full), 512, "a model")
            assert len(geometry.groups) <= 16
            every = [
                1 - (sliding + full) / (size * (-(-sliding // size) + -(-full // size)))
                for size in range(1, max(sliding, full) + 1)
                if -(-sliding // size) + -(-full // size) <= 16
            ]
            assert geometry.padding <= max(MOST_PADDING, min(every)) + 1e-9


def test_more_kinds_than_there_may_be_groups_are_refused():
    with pytest.raises(UnsupportedModelError, match="17 kinds of windows; there may be 16 groups"):
        group_layers(mixed([*range(1, 17), None]), 512, "a model")


def test_the_layers_of_a_group_lie_beside_each_other_and_every_group_at_the_start_of_a_block():
    geometry = group_layers(
        KVGeometry((LayerShape(1, 4, 2, 8), LayerShape(2, 4, 4), LayerShape(1, 2, 6, 8)), torch.float32), 64, "m"
    )
    assert [group.layers for group in geometry.groups] == [(1,), (0, 2)]
    memory = KVMemory(geometry, size_kv(geometry, 4, CPU, num_blocks=3), CPU)
    assert (memory.sizing.num_groups, memory.sizing.padding) == (2, pytest.approx(1 - 30 / 32))
    assert "in 2 groups, 6.2% of them padding" in str(memory.sizing)
    assert memory.sizing.num_tokens == 4
    for group in geometry.groups:
        memory.buffer.zero_()
        for layer in group.layers:
            for cache in memory.layers[layer]:
                cache[2] += 1
        taken = int(memory.buffer[2].sum())
        assert memory.buffer[2].max() == 1, "views overlap"
        assert memory.buffer[2, :taken].min() == 1, "views leave gaps"
        assert taken == 4 * sum(geometry.layers[layer].elements_per_token for layer in group.layers)
        assert memory.buffer[:2].abs().sum() == 0


def test_copied_rows_are_those_of_the_layers_of_their_group():
    geometry = group_layers(mixed([8, None, 8]), 64, "a model")
    assert [group.layers for group in geometry.groups] == [(1,), (0,), (2,)]
    memory = KVMemory(geometry, size_kv(geometry, 4, CPU, num_blocks=4), CPU)
    memory.buffer[1] = torch.arange(memory.buffer.shape[1])
    before = memory.layers[2][0][1, :, :3].clone()
    memory.copy_rows(np.array([[2, 1, 3, 3]], np.int32))
    assert torch.equal(memory.layers[2][0][3, :, :3], before)
    assert memory.layers[2][0][3, :, 3].abs().sum() == 0
    for wrong in (3, -1):
        with pytest.raises(InvalidInputError, match=re.escape("groups must be 0..2")):
            memory.copy_rows(np.array([[wrong, 1, 3, 3]], np.int32))
