"""Linear layers may run on the core's products; nothing else about the model changes."""

import copy

import pytest
import torch
from torch import nn

from blocktable import _core
from blocktable.errors import InvalidInputError
from blocktable.model import cpu_linear
from blocktable.model.cpu_linear import CoreLinear
from blocktable.model.linear_backend import choose_linears
from blocktable.model.loader import unwrap_model, wrap_model
from tests.model import tiny
from tests.model.served import distance, own_logits, texts_of

pytestmark = pytest.mark.usefixtures("one_torch_thread")

TEXTS = texts_of(tiny.VOCAB_SIZE)


def linears(model: nn.Module) -> list[nn.Linear]:
    return [module for module in model.modules() if isinstance(module, nn.Linear)]


def drawn(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(5))


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("name", sorted(tiny.ARCHITECTURES))
def test_the_core_multiplies_with_the_weights_where_they_are(name: str, tied: bool) -> None:
    model, twin = (tiny.build(name, tie_word_embeddings=tied) for _ in range(2))
    before = {key: weight.data_ptr() for key, weight in model.state_dict().items()}
    choice = choose_linears(model, "cpu")
    assert {key: weight.data_ptr() for key, weight in model.state_dict().items()} == before
    assert choice.layers == sum(type(module) is CoreLinear for module in model.modules()) > 0
    assert distance(own_logits(model, TEXTS), own_logits(twin, TEXTS)) < 1e-5


@pytest.mark.parametrize("instructions", _core.cpu_instructions())
@pytest.mark.parametrize("rows", [(), (1,), (2, 3), (0,)])
def test_products_equal_torchs(rows: tuple[int, ...], instructions: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("cpu_linear", "cpu_gated"):
        call = getattr(_core, name)
        monkeypatch.setattr(_core, name, lambda *a, call=call, **b: call(*a, **b, instructions=instructions))
    x, gate, up, bias = drawn(*rows, 83), drawn(37, 83), drawn(37, 83), drawn(37)
    wanted = nn.functional.linear(x, gate, bias)
    torch.testing.assert_close(cpu_linear.linear(x, gate, bias), wanted, rtol=1e-5, atol=1e-4)
    joined = nn.functional.silu(x @ gate.t()) * (x @ up.t())
    torch.testing.assert_close(cpu_linear.gated(x, gate, up, "silu"), joined, rtol=1e-5, atol=1e-3)
    joined = nn.functional.gelu(x @ gate.t(), approximate="tanh") * (x @ up.t())
    torch.testing.assert_close(cpu_linear.gated(x, gate, up, "gelu_tanh"), joined, rtol=1e-5, atol=1e-3)


def test_a_row_answers_alone_as_in_any_batch() -> None:
    x, weight = drawn(37, 600), drawn(50, 600)
    together = cpu_linear.linear(x, weight, None)
    for row in range(37):
        assert torch.equal(cpu_linear.linear(x[row], weight, None), together[row])


def test_what_the_core_cannot_multiply_goes_to_torch() -> None:
    layer = CoreLinear(8, 4)
    with torch.no_grad():
        turned = drawn(8, 3).t()
        torch.testing.assert_close(layer(turned), nn.functional.linear(turned, layer.weight, layer.bias))
        halves = copy.deepcopy(layer).to(torch.float64)
        assert halves(drawn(3, 8).double()).dtype == torch.float64
    layer(drawn(3, 8)).sum().backward()
    assert layer.weight.grad is not None


def test_torch_keeps_its_products_when_asked_to() -> None:
    model = tiny.build("llama")
    assert choose_linears(model, "torch").layers == 0
    assert not any(type(module) is CoreLinear for module in model.modules())


def test_a_processor_without_instructions_for_it_uses_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_core, "cpu_instructions", lambda: ("portable",))
    model = tiny.build("llama")
    assert choose_linears(model, "auto").backend == "torch"
    assert choose_linears(model, "cpu").backend == "cpu"


def test_what_is_no_plain_float32_linear_is_left_alone() -> None:
    class Packed(nn.Linear):
        pass

    model = tiny.build("llama")
    packed = Packed(64, 96, bias=False)
    model.model.layers[0].mlp.up_proj = packed
    choose_linears(model, "cpu")
    assert type(packed) is Packed
    halves = tiny.build("llama").to(torch.bfloat16)
    assert choose_linears(halves, "auto").backend == "torch"
    with pytest.raises(InvalidInputError, match="linear_backend.*no float32 linear layers on a CPU"):
        choose_linears(halves, "cpu")


def test_a_model_that_is_given_back_multiplies_as_before() -> None:
    model = tiny.build("llama")
    loaded = wrap_model(model, linear_backend="cpu")
    assert loaded.linears.layers == len(linears(model))
    unwrap_model(model)
    assert all(type(module) is nn.Linear for module in linears(model))
