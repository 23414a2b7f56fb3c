"""Weights may be turned over in memory; nothing else about the model changes."""

import pytest
import torch
from torch import nn

from blocktable.model import weight_layout
from blocktable.model.loader import unwrap_model, wrap_model
from blocktable.model.weight_layout import lay_out_weights
from tests.model import tiny
from tests.model.served import distance, own_logits, texts_of

pytestmark = pytest.mark.usefixtures("one_torch_thread")

TEXTS = texts_of(tiny.VOCAB_SIZE)


def linears(model: nn.Module) -> list[nn.Linear]:
    return [module for module in model.modules() if isinstance(module, nn.Linear)]


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("name", sorted(tiny.ARCHITECTURES))
def test_transposed_weights_have_the_same_values_and_shapes(name: str, tied: bool) -> None:
    model, twin = (tiny.build(name, tie_word_embeddings=tied) for _ in range(2))
    choice = lay_out_weights(model, "transposed")
    state = twin.state_dict()
    assert model.state_dict().keys() == state.keys()
    for key, weight in model.state_dict().items():
        assert torch.equal(weight, state[key])
    for linear in linears(model):
        assert linear.weight.t().is_contiguous()
    # Embeddings stay as they were: rows are looked up in them.
    assert model.get_input_embeddings().weight.is_contiguous()
    assert distance(own_logits(model, TEXTS), own_logits(twin, TEXTS)) < 1e-5
    assert choice.extra_bytes == (tiny.VOCAB_SIZE * 64 * 4 if tied else 0)
    wrap_model(model)  # and it is served like the other


def test_weights_stay_where_they_are_when_asked_to() -> None:
    model = tiny.build("llama")
    before = [weight.data_ptr() for weight in model.parameters()]
    choice = lay_out_weights(model, "as_loaded")
    assert [weight.data_ptr() for weight in model.parameters()] == before
    assert (choice.linears_transposed, choice.head_transposed, choice.linears_ms) == (False, False, None)


@pytest.mark.parametrize("tied", [True, False])
def test_what_is_tied_stays_tied_as_long_as_the_head_is_not_turned(tied: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weight_layout, "_time_both", lambda linears: (10.0, 5.0) if len(linears) > 1 else (10.0, 9.0))
    model = tiny.build("llama", tie_word_embeddings=tied)
    choice = lay_out_weights(model, "auto")
    assert (choice.linears_transposed, choice.head_transposed) == (True, False)
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == tied


def test_linears_that_share_a_weight_still_do() -> None:
    model = tiny.build("llama")
    first, second = model.model.layers[0].mlp, model.model.layers[1].mlp
    second.up_proj.weight = first.up_proj.weight
    lay_out_weights(model, "transposed")
    assert second.up_proj.weight is first.up_proj.weight
    assert first.up_proj.weight.t().is_contiguous()


@pytest.mark.parametrize("times, turned", [((10.0, 8.4), True), ((10.0, 8.6), False), ((10.0, 20.0), False), (None, False)])
def test_weights_are_turned_for_a_clear_gain_only(
    times: tuple[float, float] | None, turned: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weight_layout, "_time_both", lambda linears: times)
    choice = lay_out_weights(tiny.build("llama"), "auto")
    assert (choice.linears_transposed, choice.head_transposed) == (turned, turned)
    assert choice.linears_ms == times


def test_a_small_model_is_not_timed_and_stays_as_loaded() -> None:
    choice = lay_out_weights(tiny.build("llama"), "auto")
    assert (choice.linears_ms, choice.head_ms, choice.linears_transposed) == (None, None, False)


def test_timing_gives_both_times_and_leaves_the_threads_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weight_layout, "WORTH_TIMING_BYTES", 1)
    torch.set_num_threads(2)
    choice = lay_out_weights(tiny.build("llama"), "auto")
    assert torch.get_num_threads() == 2
    for times in (choice.linears_ms, choice.head_ms):
        assert times is not None
        assert min(times) > 0


def test_what_is_no_plain_float32_linear_is_left_alone() -> None:
    class Packed(nn.Linear):
        pass

    model = tiny.build("llama")
    packed = Packed(64, 96, bias=False)
    model.model.layers[0].mlp.up_proj = packed
    lay_out_weights(model, "transposed")
    assert packed.weight.is_contiguous()
    halves = tiny.build("llama").to(torch.bfloat16)
    lay_out_weights(halves, "transposed")
    assert all(linear.weight.is_contiguous() for linear in linears(halves))


def test_a_wrapped_model_keeps_its_layout_unless_asked() -> None:
    model = tiny.build("llama")
    wrap_model(model)
    assert all(linear.weight.is_contiguous() for linear in linears(model))
    unwrap_model(model)
    wrap_model(model, weight_layout="transposed")
    assert all(linear.weight.t().is_contiguous() for linear in linears(model))
