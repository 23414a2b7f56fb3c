"""What cannot be served is refused when it is loaded, with the reason.

Before: `loader` has a configuration, then a trace of the model. After: a model that passed is served exactly. Always: nothing
here is switched off; only the comparison of numbers (`numeric_check`) may be. What is not known to be right is refused.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import NoReturn

from transformers import PreTrainedConfig, PreTrainedModel

from ..errors import UnsupportedModelError
from .trace import AttentionCall, AttentionTrace, takes

SERVED_LAYER_TYPES = frozenset({"full_attention", "sliding_attention", "chunked_attention"})
"""Kinds of layers that keep keys and values and nothing else. Chunked ones up to one chunk: `limits`."""


def check_config(config: PreTrainedConfig, name: str) -> None:
    """Refuse by the configuration alone, before weights are read. Raises `UnsupportedModelError`."""
    if config.is_encoder_decoder:
        _refuse(name, "it is an encoder-decoder model; only decoders are served")
    text = config.get_text_config(decoder=True)
    for kind in getattr(text, "layer_types", None) or ():
        if kind not in SERVED_LAYER_TYPES:
            _refuse(name, f"it has layers of type {kind!r}, which keep or read more than keys and values of tokens")
    if shared := getattr(text, "num_kv_shared_layers", None):
        _refuse(name, f"{shared} of its layers read the keys and values of other layers")
    if getattr(text, "use_bidirectional_attention", None) in (True, "all"):
        _refuse(name, "its attention is bidirectional: a token sees those after it")
    # llama4 without a transformers cache takes the row in the batch for the position here.
    if text.model_type.startswith("llama4") and getattr(text, "attn_temperature_tuning", False):
        _refuse(name, "it scales queries by a token's row in the batch, not by its position (attn_temperature_tuning)")


def check_trace(model: PreTrainedModel, trace: AttentionTrace, name: str) -> None:
    """Refuse by what a forward pass asked for. Raises `UnsupportedModelError`."""
    if not takes(model, "position_ids"):
        _refuse(name, "its forward takes no position_ids, so sequences cannot be packed into one row")
    if not trace.calls:
        _refuse(name, "none of its layers calls attention through transformers' attention interface")
    _check_layers(model.config, trace, name)
    for call in trace.calls:
        for reason in _objections(call):
            _refuse(name, f"{call.module}: {reason}")
    rows = model.get_input_embeddings().weight.shape[0]
    if trace.logits_width > rows:
        _refuse(name, f"it scores {trace.logits_width} ids, but has embeddings for {rows}")


def check_windows(config: PreTrainedConfig, trace: AttentionTrace, max_model_len: int, name: str) -> None:
    """Refuse a model whose windows reach only its masks: these never reach us, and short texts do not show what is missing.

    Its configuration must say the same as its calls. Raises `UnsupportedModelError`.
    """
    text = config.get_text_config(decoder=True)
    window = getattr(text, "sliding_window", None)
    kinds = getattr(text, "layer_types", None) or [None] * len(trace.calls)
    for call, kind in zip(trace.calls, kinds):
        expected = window or None if kind in ("sliding_attention", None) else None
        if call.window == expected or (expected is not None and call.window is None and expected >= max_model_len):
            continue
        _refuse(name, f"{call.module}: it attends in a window of {call.window}, its configuration says {expected}")


def _check_layers(config: PreTrainedConfig, trace: AttentionTrace, name: str) -> None:
    """Every layer attends, and attends once."""
    module, times = Counter(call.module for call in trace.calls).most_common(1)[0]
    if times > 1:
        _refuse(name, f"{module} attends {times} times in one forward pass; a layer must attend once")
    layers = config.get_text_config(decoder=True).num_hidden_layers
    if len(trace.calls) != layers:
        _refuse(name, f"{len(trace.calls)} of its {layers} layers call attention; the others keep a state of another kind")
    if trace.convolutions:
        _refuse(name, f"{trace.convolutions[0]} is a convolution over tokens, which keeps a state of its own")


def _objections(call: AttentionCall) -> Iterator[str]:
    if call.batch != 1:
        yield f"it attends over {call.batch} rows where the model was given one"
    if call.has_mask:
        yield "it passes a mask of its own to attention"
    if not call.is_causal:
        yield "its attention is bidirectional: a token sees those after it"
    if call.other_options:
        yield f"it passes {', '.join(call.other_options)} to attention, which is not supported"
    if call.dropout:
        yield f"it drops out {call.dropout:.0%} of the weights while serving"
    if call.shares_kv:
        yield "it reads the keys of another layer"
    if call.query_heads % call.kv_heads:
        yield f"its {call.query_heads} query heads are no multiple of its {call.kv_heads} KV heads"


def _refuse(name: str, reason: str) -> NoReturn:
    raise UnsupportedModelError(name, reason)
