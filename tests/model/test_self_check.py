"""The checks at load: each fault of the bridge, and each model that cannot be served, is refused."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AttentionInterface, AutoModelForCausalLM, PreTrainedModel

from blocktable.errors import UnsupportedModelError
from blocktable.kernels import reference
from blocktable.model import attention_backend, numeric_check
from blocktable.model.attention_bridge import IMPLEMENTATION, paged_attention_interface
from blocktable.model.loader import wrap_model
from tests.model import tiny
from tests.model.architectures import tiny_config

pytestmark = pytest.mark.usefixtures("one_torch_thread")

Attention = Callable[..., Tensor]


def plant(monkeypatch: pytest.MonkeyPatch, **kernels: Callable[..., Any]) -> None:
    """Let the comparison of numbers run on the reference with these kernels in place of its own."""
    planted = replace(attention_backend.REFERENCE, **kernels)
    monkeypatch.setattr(numeric_check, "choose_backend", lambda *_: planted)


def _without(option: str, instead: Any) -> Attention:
    """Attention that does not see `option`."""

    def attend(*tensors: Any, **options: Any) -> Tensor:
        return reference.paged_attention(*tensors, **{**options, option: instead})

    return attend


def _half_scale(*tensors: Any, scale: float, **options: Any) -> Tensor:
    return reference.paged_attention(*tensors, scale=scale / 2, **options)


def _window_one_short(*tensors: Any, window: int, **options: Any) -> Tensor:
    return reference.paged_attention(*tensors, window=max(window - 1, 0), **options)


def _heads_in_wrong_order(q: Tensor, *tensors: Any, **options: Any) -> Tensor:
    return reference.paged_attention(q.flip(1), *tensors, **options).flip(1)


def _mutants() -> dict[str, tuple[str, Attention]]:
    """Fault: the model that shows it, and the faulty attention."""
    return {
        "soft cap ignored": ("gemma2", _without("softcap", 0.0)),
        "sinks ignored": ("gpt_oss", _without("sinks", None)),
        "window ignored": ("mistral", _without("window", 0)),
        "window ignored in one kind of layers": ("gemma3_text", _without("window", 0)),
        "window one short": ("phi3", _window_one_short),
        "scaling ignored": ("gemma2", _without("scale", 16**-0.5)),
        "scaling halved": ("llama", _half_scale),
        "heads in wrong order": ("qwen3", _heads_in_wrong_order),
    }


@pytest.mark.parametrize("fault", _mutants())
def test_an_attention_that_misreads_the_model_is_refused(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    name, attend = _mutants()[fault]
    wrap_model(tiny.build(name))  # without the fault it passes
    plant(monkeypatch, paged_attention=attend)
    with pytest.raises(UnsupportedModelError, match="does not reproduce its own"):
        wrap_model(tiny.build(name))
    wrap_model(tiny.build(name), self_check=False)  # only this check can be left out, and it alone sees this


def test_keys_and_values_in_wrong_slots_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def store_elsewhere(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor) -> None:
        reference.store_kv(k, v, k_cache, v_cache, slots.flip(0))

    plant(monkeypatch, store_kv=store_elsewhere)
    with pytest.raises(UnsupportedModelError, match="does not reproduce its own"):
        wrap_model(tiny.build("llama"))


def test_not_a_number_does_not_pass_as_small(monkeypatch: pytest.MonkeyPatch) -> None:
    def spoil(*tensors: Any, **options: Any) -> Tensor:
        return reference.paged_attention(*tensors, **options) * float("nan")

    plant(monkeypatch, paged_attention=spoil)
    with pytest.raises(UnsupportedModelError, match="differ by nan"):
        wrap_model(tiny.build("llama"))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", sorted(set(tiny.ARCHITECTURES) - set(tiny.MIXTURES)))
def test_half_precision_passes(name: str, dtype: torch.dtype) -> None:
    wrap_model(tiny.build(name).to(dtype))


def test_a_window_longer_than_the_usual_check_is_left_by_it() -> None:
    lengths = []
    model = tiny.build("mistral", sliding_window=40)
    original = numeric_check._ordinary_tokens

    def note(model: PreTrainedModel, vocab_size: int, count: int, draw: torch.Generator) -> Tensor:
        lengths.append(count)
        return original(model, vocab_size, count, draw)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(numeric_check, "_ordinary_tokens", note)
        wrap_model(model)
    assert max(lengths) > 40


# What a model may ask of attention that cannot be served: the change is made where it calls us.
Change = Callable[[torch.nn.Module, dict[str, Any]], None]


def _set(option: str, value: Any) -> Change:
    return lambda module, call: call.update({option: value})


def _share_keys(module: torch.nn.Module, call: dict[str, Any]) -> None:
    """Layer 1 attends to layer 0's keys."""
    if module.layer_idx == 0:
        _share_keys.kept = call["key"]
    if module.layer_idx == 1:
        call["key"] = _share_keys.kept


def _expand_batch(module: torch.nn.Module, call: dict[str, Any]) -> None:
    for name in ("query", "key", "value"):
        call[name] = call[name].expand(2, -1, -1, -1)


REFUSED_CALLS: dict[str, tuple[Change, str]] = {
    "a mask": (_set("attention_mask", torch.zeros(1, 1, 2, 2)), "a mask of its own"),
    "a bias by position": (_set("position_bias", torch.zeros(1, 4, 2, 2)), "passes position_bias"),
    "an option nobody knows": (_set("block_indices", [1]), "passes block_indices"),
    "bidirectional by call": (_set("is_causal", False), "bidirectional"),
    "dropout": (_set("dropout", 0.1), "drops out 10%"),
    "keys of another layer": (_share_keys, "keys of another layer"),
    "more rows than given": (_expand_batch, "attends over 2 rows"),
    "a window that is not in its configuration": (_set("sliding_window", 9), "a window of 9, its configuration says None"),
}


@pytest.mark.parametrize("what", REFUSED_CALLS)
def test_a_call_that_cannot_be_served_is_refused(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    change, reason = REFUSED_CALLS[what]

    def changed(module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **options: Any) -> Any:
        call = {"query": query, "key": key, "value": value, "attention_mask": attention_mask, **options}
        change(module, call)
        out, weights = paged_attention_interface(module, **call)
        return out[:1], weights

    monkeypatch.setitem(AttentionInterface._global_mapping, IMPLEMENTATION, changed)
    with pytest.raises(UnsupportedModelError, match=reason):
        wrap_model(tiny.build("llama"), self_check=False)  # no comparison of numbers is needed for it


def _unset_module_causality(model: PreTrainedModel) -> None:
    model.model.layers[0].self_attn.is_causal = False


def _attend_twice(model: PreTrainedModel) -> None:
    model.model.layers[1].self_attn = model.model.layers[0].self_attn


def _skip_a_layer(model: PreTrainedModel) -> None:
    model.model.layers[1].self_attn.forward = lambda hidden_states, **_: (hidden_states, None)


def _hide_window(model: PreTrainedModel) -> None:
    for layer in model.model.layers:
        layer.self_attn.config = model.config.__class__.from_dict({**model.config.to_dict(), "sliding_window": None})
        layer.self_attn.config._attn_implementation = IMPLEMENTATION


def _convolve(model: PreTrainedModel) -> None:
    inner = model.model.layers[0].mlp
    inner.mix = torch.nn.Conv1d(64, 64, 1)
    project = inner.forward
    inner.forward = lambda x: project(x) + 0 * inner.mix(x.transpose(1, 2)).transpose(1, 2)


REFUSED_MODELS: dict[str, tuple[str, Callable[[PreTrainedModel], None], str]] = {
    "bidirectional by module": ("llama", _unset_module_causality, "bidirectional"),
    "one layer's attention twice": ("llama", _attend_twice, "attends 2 times"),
    "a layer without attention": ("llama", _skip_a_layer, "3 of its 4 layers call attention"),
    "a window that only masks know": ("mistral", _hide_window, "a window of None, its configuration says 8"),
    "a convolution over tokens": ("llama", _convolve, "is a convolution over tokens"),
}


@pytest.mark.parametrize("what", REFUSED_MODELS)
def test_a_model_that_cannot_be_served_is_refused(what: str) -> None:
    name, change, reason = REFUSED_MODELS[what]
    model = tiny.build(name)
    change(model)
    with pytest.raises(UnsupportedModelError, match=reason):
        wrap_model(model, self_check=False)


@pytest.mark.parametrize(
    "field, value, reason",
    [
        ("is_encoder_decoder", True, "encoder-decoder"),
        ("layer_types", ["full_attention", "linear_attention"], "layers of type 'linear_attention'"),
        ("num_kv_shared_layers", 2, "2 of its layers read the keys and values of other layers"),
        ("use_bidirectional_attention", True, "bidirectional"),
        ("max_position_embeddings", None, "does not say how long a sequence may be"),
    ],
)
def test_a_configuration_that_cannot_be_served_is_refused(field: str, value: Any, reason: str) -> None:
    model = tiny.build("llama")
    object.__setattr__(model.config, field, value)
    with pytest.raises(UnsupportedModelError, match=reason):
        wrap_model(model, self_check=False)


def test_a_model_whose_forward_fails_is_refused() -> None:
    model = tiny.build("llama")

    def fail(*_: object) -> None:
        raise IndexError("out of rows")

    model.model.layers[0].register_forward_pre_hook(fail)
    with pytest.raises(UnsupportedModelError, match="its forward pass fails: IndexError: out of rows"):
        wrap_model(model)


@pytest.mark.parametrize(
    "changes, tokens, reason",
    [
        ({}, 512, "max_position_embeddings"),
        (
            {
                "original_max_position_embeddings": 64,
                "rope_parameters": {
                    "rope_type": "longrope",
                    "rope_theta": 10000.0,
                    "short_factor": [1.0] * 8,
                    "long_factor": [4.0] * 8,
                    "original_max_position_embeddings": 64,
                },
            },
            64,
            "original_max_position_embeddings",
        ),
    ],
)
def test_the_longest_sequence_is_one_that_is_computed_alike_in_any_batch(
    changes: dict[str, Any], tokens: int, reason: str
) -> None:
    limit = wrap_model(tiny.build("phi3", **changes)).length
    assert (limit.tokens, limit.reason.split(":")[0]) == (tokens, reason)


def test_chunked_attention_is_served_up_to_one_chunk() -> None:
    config = tiny_config("llama4_text")
    assert config is not None
    config.attn_temperature_tuning = False
    config.attention_chunk_size = 32
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    tiny.draw_weights(model)
    assert wrap_model(model).max_model_len == 32
