"""What a captured step runs: it reads nothing back from its device and brings nothing there, which no capture would allow.

Shown without a GPU: the model's numbers and the pool are tensors that only say where they would be, so that a number that is
asked for is an error, and kernels are listed in place of launched.
"""

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

pytest.importorskip("triton", reason="Triton is not installed")

from blocktable.kernels import AttentionBatch, triton_attention, triton_decode
from blocktable.kernels.bound_launch import KernelLaunch
from blocktable.model import attachment, attention_backend
from blocktable.model.decode_graphs import DecodeGraphs, Run
from blocktable.model.kv_memory import KVMemory
from blocktable.model.kv_sizing import size_kv
from blocktable.model.loader import wrap_model
from blocktable.model.rotating_attention import rotate_in_store
from tests.model import tiny

GPU = torch.device("cuda")
SEQS, ROWS, COLUMNS = 4, 6, 8


class NothingFromTheHost(TorchDispatchMode):
    """Refuses operations on tensors of the CPU."""

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = function(*args, **(kwargs or {}))
        where = {leaf.device.type for leaf in tree_leaves((args, kwargs, out)) if isinstance(leaf, Tensor)}
        assert where <= {"cuda"}, f"{function} is on {sorted(where)}"
        return out


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The kernels that would be launched, on an H200."""
    found: list[str] = []
    monkeypatch.setattr(KernelLaunch, "run", lambda self, launch=None: found.append(self.kernel.__name__))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    for module in (attention_backend, triton_attention, triton_decode):
        monkeypatch.setattr(module, "target_of", lambda tensor: "sm_90")
    return found


@contextmanager
def prepared(name: str) -> Iterator[Run]:
    """What a graph of four sequences would capture."""
    model = tiny.build(name)
    loaded = wrap_model(model, self_check=False)
    rotate_in_store(model, model.__dict__[attachment._ATTACHMENT].trace)
    sizing = size_kv(loaded.geometry, 16, loaded.device, num_blocks=64)
    with FakeTensorMode():
        for module in model.modules():
            for key, own in module._parameters.items():
                if own is not None:
                    module._parameters[key] = nn.Parameter(
                        torch.empty(own.shape, dtype=own.dtype, device=GPU), requires_grad=False
                    )
            for key, buffer in module._buffers.items():
                if buffer is not None:
                    module._buffers[key] = torch.empty(buffer.shape, dtype=buffer.dtype, device=GPU)
        memory = KVMemory(loaded.geometry, sizing, GPU)
        groups = [memory.geometry.group_of(layer) for layer in range(len(memory.layers))]
        graphs = DecodeGraphs(loaded, memory, groups, attention_backend._triton, NoGraphs(), keeps_rows=True)
        run = graphs._pass(*_on_the_gpu(1 + max(groups)), SEQS, COLUMNS)
        with NothingFromTheHost():
            yield run


def captured_pass(name: str) -> Tensor:
    """Its answer."""
    with prepared(name) as run:
        return run()


def _move(tensors: dict[str, Any]) -> None:
    """To the GPU that there is not."""
    for name, own in tensors.items():
        if own is not None:
            there = torch.empty(own.shape, dtype=own.dtype, device=GPU)
            tensors[name] = nn.Parameter(there, requires_grad=False) if isinstance(own, nn.Parameter) else there


class NoGraphs:
    """Captures nothing."""

    def capture(self, run: Run) -> Run:
        return run


def _on_the_gpu(num_groups: int) -> tuple[Any, Any]:
    """What a step of a graph reads, and the tables."""
    kinds = [torch.int64, torch.int64, torch.int64, torch.int32, torch.int32, torch.int64, torch.int32]
    shapes = [(num_groups, SEQS) if index == 2 else (SEQS,) for index in range(len(kinds))]
    arrays = [torch.zeros(shape, dtype=kind, device=GPU) for shape, kind in zip(shapes, kinds, strict=True)]
    flat = torch.zeros(num_groups * ROWS * COLUMNS + 1, dtype=torch.int32, device=GPU)
    tables = SimpleNamespace(flat=flat, tables=flat[:-1].view(num_groups, ROWS, COLUMNS))
    return SimpleNamespace(parcel=SimpleNamespace(device=arrays)), tables


@pytest.mark.parametrize("name", tiny.ARCHITECTURES)
def test_a_captured_pass_reads_nothing_back_and_brings_nothing(name: str, launched: list[str]) -> None:
    logits = captured_pass(name)
    assert (logits.shape, logits.device.type) == ((SEQS, tiny.VOCAB_SIZE), "cuda")
    layers = launched.count("_decode")
    assert layers >= 3
    assert launched.count("_store") == 2 * (layers - launched.count("_rope_store"))


def test_a_model_like_llama_rotates_in_its_store(launched: list[str]) -> None:
    captured_pass("llama")
    assert launched == ["_rope_store", "_decode"] * 4


def test_a_pass_leaves_none_of_its_memory_behind(launched: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """It goes back to the pool that all graphs share: what one decodes with, the next one decodes with too."""
    made: list[weakref.ref[Any]] = []
    own = triton_decode.DecodeScratch.__init__

    def noted(self: triton_decode.DecodeScratch) -> None:
        own(self)
        made.append(weakref.ref(self))

    monkeypatch.setattr(triton_decode.DecodeScratch, "__init__", noted)
    with prepared("llama") as run:
        for passes in (1, 2):
            run()
            assert [scratch() for scratch in made] == [None] * passes, "one of each pass, for all of its layers"


def test_lengths_that_are_read_back_are_told(launched: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: a batch that looks at its tensors."""
    read = lambda tables, starts, lens, size, **_most: AttentionBatch.build(tables, starts, lens, size)  # noqa: E731
    monkeypatch.setattr(AttentionBatch, "unread", read)
    with pytest.raises(DataDependentOutputException):
        captured_pass("llama")


def test_numbers_that_the_host_brings_are_told(launched: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: lengths that the host sends."""
    own = AttentionBatch.unread
    brought = lambda tables, starts, lens, size, **most: own(tables, starts, torch.ones(SEQS).int().to(GPU), size, **most)  # noqa: E731
    monkeypatch.setattr(AttentionBatch, "unread", brought)
    with pytest.raises(AssertionError, match="is on "):
        captured_pass("llama")
