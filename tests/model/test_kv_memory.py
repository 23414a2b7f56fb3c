"""The KV memory: geometry as seen, size as asked for, views that cover the allocation and never overlap."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
from torch import Tensor

from blocktable.errors import InvalidInputError, UnsupportedModelError
from blocktable.model import kv_memory, kv_sizing
from blocktable.model.geometry import KVGeometry, LayerShape, read_geometry
from blocktable.model.host_memory import available_host_bytes
from blocktable.model.kv_memory import KVMemory
from blocktable.model.kv_sizing import KVSizing, size_kv
from blocktable.model.loader import wrap_model
from blocktable.model.trace import AttentionTrace
from tests.model import tiny
from tests.model.architectures import tiny_model

CPU = torch.device("cpu")
UNEVEN = KVGeometry((LayerShape(2, 8, 6), LayerShape(1, 5, 5), LayerShape(3, 4, 7)), torch.float32)
"""Layers of three shapes, keys and values of different widths."""


def sized(geometry: KVGeometry, block_size: int, num_blocks: int) -> KVSizing:
    return size_kv(geometry, block_size, CPU, num_blocks=num_blocks)


@pytest.mark.parametrize(
    "name, layers",
    [
        ("llama", [LayerShape(2, 16, 16)] * 4),
        ("gpt2", [LayerShape(4, 16, 16)] * 3),
        ("deepseek_v3", [LayerShape(4, 24, 12)] * 4),  # keys of 16 + 8, values of 12
    ],
)
def test_the_geometry_is_what_the_layers_hand_over(name: str, layers: list[LayerShape]) -> None:
    geometry = wrap_model(tiny.build(name), self_check=False).geometry
    assert list(geometry.layers) == layers
    assert geometry.dtype == torch.float32
    per_token = 4 * sum(layer.kv_heads * (layer.key_dim + layer.value_dim) for layer in layers)
    assert geometry.bytes_per_token == per_token
    assert geometry.bytes_per_block(7) == 7 * per_token


def test_layers_may_differ_in_shape() -> None:
    model = tiny_model("mimo_v2_flash")
    if isinstance(model, str):
        pytest.skip(f"this transformers builds no tiny mimo_v2_flash: {model}")
    geometry = wrap_model(model).geometry
    assert len(set(geometry.layers)) > 1


def test_a_model_without_keys_has_no_geometry() -> None:
    with pytest.raises(UnsupportedModelError, match="no layer of it calls attention"):
        read_geometry(AttentionTrace((), 128, ()), "empty")


def check_views(block_size: int) -> None:
    """The views cover the allocation and never overlap."""
    memory = KVMemory(UNEVEN, sized(UNEVEN, block_size, 5), CPU)
    views = [view for pair in memory.layers for view in pair]
    assert sum(view.numel() for view in views) == memory.buffer.numel()
    assert memory.buffer.nbytes == memory.sizing.total_bytes
    for view in views:
        assert (view == 0).all()
        view += 1
    # Each element was in exactly one view.
    assert (memory.buffer == 1).all()


@pytest.mark.parametrize("block_size", [1, 7, 16])
def test_views_cover_the_allocation_and_never_overlap(block_size: int) -> None:
    check_views(block_size)


@pytest.mark.parametrize(
    "fault",
    [
        lambda k, v: (k, k.as_strided(v.shape, v.stride(), k.storage_offset())),  # values over the keys
        lambda k, v: (k, v.as_strided(v.shape, v.stride(), v.storage_offset() - 1)),  # one element too early
        lambda k, v: (k, v[..., :-1]),  # a column too few
        lambda k, v: (k, v.clone()),  # not in the allocation
    ],
)
def test_views_that_overlap_or_leave_gaps_would_be_noticed(
    monkeypatch: pytest.MonkeyPatch, fault: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
) -> None:
    right = kv_memory._layer_views
    monkeypatch.setattr(kv_memory, "_layer_views", lambda *given: tuple(fault(k, v) for k, v in right(*given)))
    with pytest.raises(AssertionError):
        check_views(7)


def test_a_block_is_one_row_with_keys_before_values_layer_by_layer() -> None:
    memory = KVMemory(UNEVEN, sized(UNEVEN, 2, 4), CPU)
    number = 0.0
    for layer, (k_cache, v_cache) in zip(UNEVEN.layers, memory.layers):
        assert k_cache.shape == (4, layer.kv_heads, 2, layer.key_dim)
        assert v_cache.shape == (4, layer.kv_heads, 2, layer.value_dim)
        for cache in (k_cache, v_cache):
            count = cache[3].numel()
            cache[3] = torch.arange(number, number + count).view_as(cache[3])
            number += count
    assert torch.equal(memory.buffer[3], torch.arange(number))
    assert (memory.buffer[:3] == 0).all()


def test_pages_are_taken_when_they_are_written() -> None:
    wide = KVGeometry((LayerShape(8, 128, 128),), torch.float32)
    before = psutil.Process().memory_info().rss
    sizing = KVSizing(
        num_blocks=16384, block_size=16, bytes_per_block=wide.bytes_per_block(16), chosen_by="num_blocks", available_bytes=None
    )
    memory = KVMemory(wide, sizing, CPU)
    assert memory.buffer.nbytes == 2 * 2**30
    assert psutil.Process().memory_info().rss - before < 2**28
    assert float(memory.buffer[9000].abs().max()) == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_memory_has_the_dtype_of_the_keys(dtype: torch.dtype) -> None:
    geometry = KVGeometry(UNEVEN.layers, dtype)
    memory = KVMemory(geometry, sized(geometry, 4, 3), CPU)
    assert memory.layers[0][0].dtype == dtype
    assert memory.buffer.nbytes == 3 * geometry.bytes_per_block(4)


def test_copies_move_the_first_rows_of_a_block_in_order() -> None:
    memory = KVMemory(UNEVEN, sized(UNEVEN, 4, 6), CPU)
    memory.buffer.copy_(torch.arange(memory.buffer.numel(), dtype=torch.float32).view_as(memory.buffer))
    before = [[cache.clone() for cache in pair] for pair in memory.layers]
    memory.copy_rows(np.array([[0, 1, 2, 3], [0, 2, 3, 4]], np.int32))
    for old, new in zip(before, memory.layers):
        for was, cache in zip(old, new):
            assert torch.equal(cache[2, :, :3], was[1, :, :3])
            assert torch.equal(cache[2, :, 3:], was[2, :, 3:])
            assert torch.equal(cache[3], cache[2])
            for untouched in (0, 1, 4, 5):
                assert torch.equal(cache[untouched], was[untouched])


@pytest.mark.parametrize("copy", [[1, 1, 2, 3], [0, 6, 2, 3], [0, 1, 6, 3], [0, -1, 2, 3], [0, 1, 2, 5], [0, 1, 2, -1]])
def test_a_copy_out_of_range_is_refused_before_any_is_made(copy: list[int]) -> None:
    memory = KVMemory(UNEVEN, sized(UNEVEN, 4, 6), CPU)
    memory.buffer[1] = 1
    with pytest.raises(InvalidInputError, match="copies"):
        memory.copy_rows(np.array([[0, 1, 2, 3], copy], np.int32))
    assert (memory.buffer[2] == 0).all()


PER_BLOCK = UNEVEN.bytes_per_block(4)


@pytest.mark.parametrize(
    "given, blocks, chosen_by",
    [
        ({"num_blocks": 9}, 9, "num_blocks"),
        ({"kv_cache_memory_bytes": 10 * PER_BLOCK + 1}, 10, "kv_cache_memory_bytes"),
        ({"memory_share": 0.25}, 250, "memory_share"),
        ({}, 500, "default share of memory"),
        ({"num_blocks": 9, "kv_cache_memory_bytes": 5 * PER_BLOCK, "memory_share": 0.1}, 9, "num_blocks"),
        ({"kv_cache_memory_bytes": 5 * PER_BLOCK, "memory_share": 0.1}, 5, "kv_cache_memory_bytes"),
    ],
)
def test_the_size_is_what_was_asked_for_and_says_why(
    monkeypatch: pytest.MonkeyPatch, given: dict[str, float], blocks: int, chosen_by: str
) -> None:
    monkeypatch.setattr(kv_sizing, "available_host_bytes", lambda: 1000 * PER_BLOCK)
    sizing = size_kv(UNEVEN, 4, CPU, **given)
    assert (sizing.num_blocks, sizing.chosen_by, sizing.available_bytes) == (blocks, chosen_by, 1000 * PER_BLOCK)
    assert sizing.total_bytes == blocks * PER_BLOCK <= 1000 * PER_BLOCK
    assert sizing.num_tokens == 4 * (blocks - 1)
    assert str(sizing).startswith(f"{blocks} KV blocks of 4 tokens")
    assert str(sizing).endswith(f"chosen by {chosen_by}")


class Neighbour:
    """Another process takes memory, and gives it back, between any two looks at what is free."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.num_looks = 0
        monkeypatch.setattr(kv_sizing, "available_host_bytes", self.look)

    def look(self) -> int:
        self.num_looks += 1
        return (1000 if self.num_looks % 2 else 400) * PER_BLOCK


def check_beside_others(neighbour: Neighbour) -> None:
    """A number is what it says; a share is of one look, and of no difference between two."""
    for given, blocks in [({"num_blocks": 300}, 300), ({"kv_cache_memory_bytes": 300 * PER_BLOCK}, 300)] * 2:
        assert size_kv(UNEVEN, 4, CPU, **given).num_blocks == blocks
    neighbour.num_looks = 0
    sizing = size_kv(UNEVEN, 4, CPU, memory_share=0.5)
    assert (neighbour.num_looks, sizing.num_blocks) == (1, 500), "more than one look at what is free"


def test_a_neighbour_that_takes_and_gives_memory_changes_no_size(monkeypatch: pytest.MonkeyPatch) -> None:
    check_beside_others(Neighbour(monkeypatch))


def test_a_size_by_the_difference_of_two_looks_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted: what was used in between is taken for our own."""
    neighbour = Neighbour(monkeypatch)
    look = kv_sizing.available_bytes
    monkeypatch.setattr(kv_sizing, "available_bytes", lambda device: look(device) - abs(look(device) - look(device)))
    with pytest.raises((AssertionError, InvalidInputError)):
        check_beside_others(neighbour)


@pytest.mark.parametrize(
    "given, field, bound",
    [
        ({"num_blocks": 1}, "num_blocks", "must be at least 2"),
        ({"num_blocks": 0}, "num_blocks", "must be at least 2"),
        ({"num_blocks": -5}, "num_blocks", "must be at least 2"),
        ({"num_blocks": 2**31}, "num_blocks", "can be numbered"),
        ({"num_blocks": 1001}, "num_blocks", "at most .* are free, which is 1000 blocks"),
        ({"kv_cache_memory_bytes": 2 * PER_BLOCK - 1}, "kv_cache_memory_bytes", "gives 1 KV blocks .* 2 blocks are needed"),
        ({"kv_cache_memory_bytes": 2000 * PER_BLOCK}, "kv_cache_memory_bytes", "are free"),
        ({"memory_share": 0.001}, "memory_share", "gives 1 KV blocks"),
        ({"memory_share": 0.0}, "memory_share", "above 0"),
        ({"memory_share": 1.5}, "memory_share", "at most 1"),
        ({"memory_share": float("nan")}, "memory_share", "above 0"),
    ],
)
def test_a_size_that_cannot_be_is_refused_with_the_numbers(
    monkeypatch: pytest.MonkeyPatch, given: dict[str, float], field: str, bound: str
) -> None:
    monkeypatch.setattr(kv_sizing, "available_host_bytes", lambda: 1000 * PER_BLOCK)
    with pytest.raises(InvalidInputError, match=bound) as caught:
        size_kv(UNEVEN, 4, CPU, **given)
    assert caught.value.field == field
    assert caught.value.value is given[field]


def test_a_block_size_below_one_is_refused() -> None:
    with pytest.raises(InvalidInputError, match="block_size=0: must be at least 1"):
        size_kv(UNEVEN, 0, CPU, num_blocks=4)


def test_where_the_system_does_not_say_what_is_free_a_number_must_be_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_sizing, "available_host_bytes", lambda: None)
    assert size_kv(UNEVEN, 4, CPU, num_blocks=7).num_blocks == 7
    with pytest.raises(InvalidInputError, match="give num_blocks"):
        size_kv(UNEVEN, 4, CPU)


def test_memory_that_the_system_does_not_give_is_refused() -> None:
    per_block = UNEVEN.bytes_per_block(2**20)
    huge = KVSizing(
        num_blocks=2**31 - 1, block_size=2**20, bytes_per_block=per_block, chosen_by="num_blocks", available_bytes=None
    )
    with pytest.raises(InvalidInputError, match="cannot be had"):
        KVMemory(UNEVEN, huge, CPU)


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


@pytest.mark.parametrize(
    "groups, free",
    [
        ({}, 8 * 2**20),
        ({"memory.max": "max\n", "memory.current": "5\n"}, 8 * 2**20),
        ({"memory.max": f"{3 * 2**20}\n", "memory.current": f"{2**20}\n"}, 2 * 2**20),
        ({"a/b/memory.max": f"{3 * 2**20}\n", "a/b/memory.current": f"{2**20}\n"}, 2 * 2**20),
        (
            {
                "a/memory.max": f"{3 * 2**20}\n",
                "a/memory.current": f"{2**20}\n",
                "a/memory.stat": f"anon 1\ninactive_file {2**19}\n",
            },
            2 * 2**20 + 2**19,
        ),
        ({"a/memory.max": f"{2**20}\n", "a/memory.current": f"{2 * 2**20}\n"}, 0),
        ({"memory/a/memory.limit_in_bytes": f"{2**20}\n", "memory/a/memory.usage_in_bytes": "0\n"}, 2**20),
        ({"memory/memory.limit_in_bytes": f"{2**63 - 4096}\n", "memory/memory.usage_in_bytes": "0\n"}, 8 * 2**20),
    ],
)
def test_a_containers_limit_counts_like_the_machines_own(tmp_path: Path, groups: dict[str, str], free: int) -> None:
    proc, tree = tmp_path / "proc", tmp_path / "cgroup"
    write(proc / "meminfo", "MemTotal: 999999 kB\nMemAvailable:    8192 kB\n")
    old = any("limit_in_bytes" in name for name in groups)
    write(proc / "self" / "cgroup", "9:cpu:/a\n4:memory:/a/b\n" if old else "0::/a/b\n")
    for name, text in groups.items():
        write(tree / name, text)
    assert available_host_bytes(proc, tree) == free


def test_this_machine_has_memory_left() -> None:
    free = available_host_bytes()
    assert free is not None
    assert 0 < free <= psutil.virtual_memory().total
