"""A step on a device waits for it once, for the sampled tokens.

The device of these tests is `meta`, which has no numbers: reading one back raises. Copies to it must not wait.
"""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch", reason="needs the extra `engine`")
pytest.importorskip("triton", reason="Triton is not installed")

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from blocktable.kernels import bound_launch
from blocktable.model import attention_backend, decode_graphs, gpu_attention
from blocktable.model.attention_backend import CascadeRule
from blocktable.model.runner import ModelRunner
from blocktable.sampling.sampler import Sampler
from tests.model import tiny
from tests.model.handmade_plan import HandmadePlan, Pages
from tests.model.served import serve, texts_of

META = torch.device("meta")
TEXTS = texts_of(tiny.VOCAB_SIZE, lengths=(21, 13, 9))


class Waits(TorchDispatchMode):
    """Notes copies from the host to the device that wait for it."""

    def __init__(self) -> None:
        super().__init__()
        self.noted: list[str] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        named = dict(kwargs or {})
        name = function.overloadpacket.__name__
        if name == "_to_copy" and args[0].device.type == "cpu" and torch.device(named.get("device") or "cpu") == META:
            self._note(name, waits=not named.get("non_blocking"))
        if name == "copy_" and args[0].is_meta and not args[1].is_meta:
            waits = not (named.get("non_blocking") or (args[2] if len(args) > 2 else False))
            self._note(name, waits=waits)
        return function(*args, **named)

    def _note(self, name: str, *, waits: bool) -> None:
        if waits:
            self.noted.append(name)


class Again:
    """Graphs that run each time what was captured."""

    def capture(self, run: decode_graphs.Run) -> decode_graphs.Run:
        return run


class Shared(HandmadePlan):
    """A plan whose sequences all begin with one block."""

    def prefix_groups(self, **_options: int) -> Any:
        members = np.arange(self.num_seqs, dtype=np.int32)
        return members, np.array([0, self.num_seqs], np.int32), np.array([1], np.int32)


@pytest.fixture
def on_meta(monkeypatch: pytest.MonkeyPatch) -> None:
    """The device `meta` is a GPU whose kernels do nothing."""
    own = attention_backend._objection
    monkeypatch.setattr(attention_backend, "_objection", lambda name, *rest: None if name == "triton" else own(name, *rest))
    for module in (gpu_attention.triton_attention, gpu_attention.triton_decode, gpu_attention.triton_cascade):
        monkeypatch.setattr(module, "target_of", lambda tensor: "sm_90")
    monkeypatch.setattr(bound_launch.KernelLaunch, "run", lambda self, launch=None: None)


def play(*, has_graphs: bool = False, shares: bool = False) -> list[str]:
    """Chunks, a mixture and single queries on the device that has no numbers; what waited for it."""
    pages = Pages(TEXTS, block_size=4)
    pages.tables[0, :, 0] = pages.tables[0, 0, 0]
    served = serve(tiny.build("llama"), pages)
    loaded, memory = replace(served.loaded, device=META), served.memory
    loaded.model.to(META)
    memory.device, memory.buffer = META, memory.buffer.to(META)
    memory.layers = tuple((k.to(META), v.to(META)) for k, v in memory.layers)
    runner = ModelRunner(loaded, memory, "triton", Again() if has_graphs else None)
    with Waits() as waits:
        for counts in ([18, 10, 6], [1, 2, 1], [1, 1, 1], [1, 0, 1]):
            plan = pages.plan(counts, samples=list(range(sum(map(bool, counts)))))
            if shares:
                plan = Shared(**{name: getattr(plan, name) for name in plan.__dataclass_fields__})
            logits = runner.forward(plan)
            assert logits.is_meta
            assert logits.shape == (len(plan.sample_rows), tiny.VOCAB_SIZE)
    return waits.noted


@pytest.mark.usefixtures("on_meta")
@pytest.mark.parametrize("has_graphs", [False, True])
def test_no_step_waits_for_the_device(has_graphs: bool) -> None:
    assert play(has_graphs=has_graphs) == []


@pytest.mark.usefixtures("on_meta")
def test_no_step_whose_prefixes_are_shared_waits_for_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    met: list[bool] = []
    own = gpu_attention.triton_cascade.cascade_decode
    cascade = lambda *given, **options: met.append(True) or own(*given, **options)  # noqa: E731
    monkeypatch.setattr(gpu_attention.triton_cascade, "cascade_decode", cascade)
    monkeypatch.setattr(gpu_attention, "CASCADE", CascadeRule(positions=1, bytes=0, bytes_instead_of_graph=0))
    assert play(shares=True) == []
    assert met


def reads_lengths_back(self: Any, *arrays: Tensor) -> Any:
    arrays[2].tolist()
    return ON_DEVICE(self, *arrays)


def copies_with_a_wait(self: Any) -> list[Tensor]:
    self._to.copy_(self._from)
    return self.device


ON_DEVICE = gpu_attention.AttentionBatch.on_device


@pytest.mark.usefixtures("on_meta")
def test_a_length_that_is_read_back_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_attention.AttentionBatch, "on_device", reads_lengths_back)
    with pytest.raises((NotImplementedError, RuntimeError), match="meta"):
        play()


@pytest.mark.usefixtures("on_meta")
def test_a_copy_that_waits_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    from blocktable.model import parcel

    monkeypatch.setattr(parcel.Parcel, "send", copies_with_a_wait)
    assert "copy_" in play()


def test_sampling_reads_back_once_for_greedy_rows_and_once_more_for_those_that_are_drawn(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On a CPU that is taken for a device: the reads are those of `Tensor.cpu`."""
    from blocktable.sampling import sampler as module
    from tests.sampling.test_sampler import resolved

    monkeypatch.setattr(module, "_is_on_host", lambda logits: False)
    reads: list[int] = []
    own = Tensor.cpu
    monkeypatch.setattr(Tensor, "cpu", lambda self, *rest: reads.append(self.numel()) or own(self, *rest))
    sampler, logits = Sampler(3, 8), torch.randn(3, 8)
    rows, positions = np.arange(3), np.zeros(3, dtype=np.int64)
    assert sampler.sample(logits, rows, positions).ids.tolist() == logits.argmax(1).tolist()
    assert len(reads) == 1
    sampler.set_row(1, resolved(temperature=1.0), 7)
    sampler.sample(logits, rows, positions)
    assert len(reads) == 3


def sampled_with_everything(is_drawn: bool) -> tuple[list[int], list[str]]:
    """Rows with log probabilities, penalties, a bias and masks, on a CPU that is taken for a device: what was read back, and
    what was sent there and waited for."""
    from blocktable.sampling import sampler as module
    from tests.sampling.test_sampler import resolved

    reads, waited = [], []
    own_cpu, own_to = Tensor.cpu, Tensor.to

    def to(self: Tensor, *rest: Any, **named: Any) -> Tensor:
        if named.get("non_blocking") is not True and rest and isinstance(rest[0], torch.device):
            waited.append(str(rest))
        return own_to(self, *rest, **named)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_is_on_host", lambda logits: False)
        patch.setattr(Tensor, "cpu", lambda self, *rest: reads.append(self.numel()) or own_cpu(self, *rest))
        for name in ("item", "tolist", "nonzero"):
            patch.setattr(Tensor, name, lambda *given: pytest.fail("a number of the device was read"))
        patch.setattr(Tensor, "to", to)
        sampler = Sampler(3, 97)
        options = {"logprobs": 3, "repetition_penalty": 1.3, "logit_bias": {5: 1}, "bad_words": ["a"], "min_tokens": 2}
        for row in range(3):
            asked = resolved(temperature=float(is_drawn and row > 0), allowed_token_ids=[row, 30, 31], **options)
            sampler.set_row(row, asked, row, np.arange(5), np.arange(3))
        told = sampler.sample(torch.randn(3, 97), np.arange(3), np.zeros(3, dtype=np.int64)).logprobs
        assert told is not None
        assert len(told.entries) == 3
    return reads, waited


def test_what_rows_ask_for_beside_costs_no_further_read() -> None:
    assert [len(part) for part in sampled_with_everything(is_drawn=False)] == [1, 0]
    assert [len(part) for part in sampled_with_everything(is_drawn=True)] == [2, 0]


def test_a_read_more_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    from blocktable.sampling import device

    own = device._top
    monkeypatch.setattr(device, "_top", lambda raw, most: own(raw, most).cpu())
    assert len(sampled_with_everything(is_drawn=False)[0]) == 2
