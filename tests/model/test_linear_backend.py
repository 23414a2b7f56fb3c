"""Linear layers may run on the core's products; nothing else about the model changes."""

import copy
from typing import Any

import pytest
import torch
from torch import nn

from blocktable import _core
from blocktable.errors import InvalidInputError
from blocktable.model import cpu_linear
from blocktable.model.core_layer import JoinedForward
from blocktable.model.cpu_linear import CoreLinear
from blocktable.model.linear_backend import choose_linears
from blocktable.model.loader import unwrap_model, wrap_model
from tests.model import tiny
from tests.model.served import distance, own_logits, paged_logits, texts_of

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


def joined_llama(**options: object) -> Any:
    model = tiny.build("llama", **options)
    loaded = wrap_model(model, linear_backend="cpu", self_check=False)
    assert loaded.linears.joined == len(model.model.layers)
    return model


@pytest.mark.parametrize("name", sorted(tiny.ARCHITECTURES))
def test_a_model_with_joined_layers_gives_its_own_logits(name: str) -> None:
    expected = own_logits(tiny.build(name), TEXTS)
    assert distance(paged_logits(tiny.build(name), TEXTS), expected) < 1e-5


def test_layers_built_like_llamas_are_joined_and_no_others() -> None:
    joined = {
        name: wrap_model(tiny.build(name), linear_backend="cpu", self_check=False).linears.joined > 0
        for name in ("llama", "gemma2")
    }
    assert joined == {"llama": True, "gemma2": False}


def test_a_joined_layer_answers_as_itself() -> None:
    for options in ({}, {"attention_bias": False}, {"hidden_act": "gelu_pytorch_tanh"}):
        joined_llama(**options)


@pytest.mark.parametrize("fault", ["residual", "norm", "turned", "order"])
def test_a_layer_that_does_something_else_keeps_its_own_forward(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny.build("llama")
    own = type(model.model.layers[0])
    forward = own.forward

    def other(self: Any, hidden_states: torch.Tensor, **options: Any) -> torch.Tensor:
        if fault == "norm":
            hidden_states = hidden_states * 1.5
        if fault == "turned":
            cos, sin = options["position_embeddings"]
            options["position_embeddings"] = (cos, -sin)
        answer: torch.Tensor = forward(self, hidden_states, **options)
        if fault == "residual":
            return answer + 0.1 * hidden_states
        return answer.flip(-1) if fault == "order" else answer

    monkeypatch.setattr(own, "forward", other)
    assert wrap_model(model, linear_backend="cpu", self_check=False).linears.joined == 0
    assert type(model.model.layers[0]) is own


def test_the_same_wish_again_changes_nothing_and_another_parts_the_layers() -> None:
    model = joined_llama()
    types = [type(module) for module in model.modules()]
    assert wrap_model(model, linear_backend="cpu", self_check=False).linears.joined > 0
    assert [type(module) for module in model.modules()] == types
    assert wrap_model(model, linear_backend="torch", self_check=False).linears.joined == 0
    assert not any(isinstance(module, JoinedForward) for module in model.modules())


def test_a_copy_of_a_joined_model_has_weights_of_its_own() -> None:
    model = joined_llama()
    twin = copy.deepcopy(model)
    layer = twin.model.layers[0]
    assert layer.__dict__["_blocktable_joined"].gate is layer.mlp.gate_proj.weight
    assert layer.mlp.gate_proj.weight is not model.model.layers[0].mlp.gate_proj.weight


def test_a_joined_model_that_is_given_back_runs_its_own_layers() -> None:
    expected = own_logits(tiny.build("llama"), TEXTS)
    model = joined_llama()
    unwrap_model(model)
    assert not any(isinstance(module, JoinedForward | CoreLinear) for module in model.modules())
    assert distance(own_logits(model, TEXTS), expected) < 1e-6
