"""The kernels that a model runs on are those that its device, dtype and head sizes allow, or those asked for."""

import pytest
import torch

from blocktable.errors import InvalidInputError
from blocktable.model import attention_backend
from blocktable.model.attention_backend import choose_backend
from blocktable.model.geometry import KVGeometry, LayerShape

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


def geometry(dtype: torch.dtype = torch.float32, width: int = 64) -> KVGeometry:
    return KVGeometry((LayerShape(2, width, width),), dtype)


@pytest.fixture
def target(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What the GPU is, in a list of one; there need not be one."""
    found = ["sm_90"]
    empty = torch.empty
    monkeypatch.setattr(attention_backend, "target_of", lambda tensor: found[0])
    monkeypatch.setattr(torch, "empty", lambda *sizes, device=None, **rest: empty(*sizes, **rest))
    return found


def test_the_fastest_that_can_run_is_taken(target: list[str]) -> None:
    assert choose_backend("auto", CPU, geometry()).name == "cpu"
    assert choose_backend("auto", CPU, geometry(torch.float64)).name == "reference"
    assert choose_backend("reference", CPU, geometry()).name == "reference"
    assert choose_backend("auto", GPU, geometry(torch.bfloat16, 128)).name == "triton"
    assert choose_backend("auto", GPU, geometry(torch.bfloat16, 512)).name == "reference"
    target[0] = "sm_70"
    assert choose_backend("auto", GPU, geometry(torch.float16)).name == "reference"


@pytest.mark.parametrize(
    ("name", "device", "shape", "bound"),
    [
        ("cpu", GPU, geometry(), "the model is on cuda:0: must be on the CPU"),
        ("cpu", CPU, geometry(torch.float64), "must be one of float32, bfloat16, float16"),
        ("triton", CPU, geometry(), "the model is on cpu: must be on a GPU"),
        ("triton", GPU, geometry(torch.float16, 300), "Dk=300: must be at most 256"),
        ("flash", CPU, geometry(), "must be one of auto, cpu, triton, reference"),
    ],
)
def test_one_that_cannot_run_is_refused(
    name: str, device: torch.device, shape: KVGeometry, bound: str, target: list[str]
) -> None:
    with pytest.raises(InvalidInputError, match="attention_backend") as caught:
        choose_backend(name, device, shape)
    assert bound in caught.value.bound
