"""What one forward pass of a model asks of attention: which modules call, in which order, with what.

Before: `loader` has a model that calls our attention. After: `geometry` reads the shapes, `self_check` the rest. Always: it is
seen, not read from a configuration: the model runs once on two tokens and every call is written down.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ..errors import UnsupportedModelError
from .attention_bridge import bind_layers, slot_of

HONOURED = frozenset({"attention_mask", "scaling", "dropout", "sliding_window", "softcap", "s_aux"})
"""What our attention is given by name; the mask must be None and the dropout 0."""

WITHOUT_EFFECT = frozenset(
    {
        "is_causal",
        "position_ids",
        "use_cache",
        "output_attentions",
        "output_hidden_states",
        "output_router_logits",
        "return_dict",
    }
)
"""Options that reach attention but say nothing about its result once they are checked (`is_causal` is, by `self_check`)."""


@dataclass(frozen=True, slots=True)
class AttentionCall:
    """One call for attention of a forward pass."""

    module: str
    """Name of the attention module in the model."""
    batch: int
    query_heads: int
    kv_heads: int
    key_dim: int
    value_dim: int
    dtype: torch.dtype
    """Of the keys."""
    scale: float | None
    window: int | None
    softcap: float | None
    has_sinks: bool
    is_causal: bool
    has_mask: bool
    dropout: float
    other_options: tuple[str, ...]
    """Options that were set and that we neither honour nor know to be without effect."""
    shares_kv: bool
    """The keys are those of an earlier call."""


@dataclass(frozen=True, slots=True)
class AttentionTrace:
    """All that one forward pass asked for. `calls` are in order; the KV memory's layers are numbered so."""

    calls: tuple[AttentionCall, ...]
    logits_width: int
    """Scores that the model gives for a row."""
    convolutions: tuple[str, ...]
    """Names of convolutions over tokens that ran: they keep state from token to token."""


@dataclass(slots=True)
class _Recorder:
    """A context that writes calls down and answers with zeros."""

    modules: list[tuple[str, nn.Module]]
    calls: list[AttentionCall] = field(default_factory=list)
    order: list[nn.Module] = field(default_factory=list)
    keys: list[Tensor] = field(default_factory=list)  # kept alive, so that no two calls' keys can have one address by chance

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, options: dict[str, Any]) -> Tensor:
        """Here `layer` is the module's place among all modules of the model."""
        name, module = self.modules[layer]
        self.calls.append(_describe(name, module, query, key, value, options, shares_kv=self._seen(key)))
        self.order.append(module)
        self.keys.append(key)
        return query.new_zeros(query.shape[0], query.shape[2], query.shape[1], value.shape[3])

    def _seen(self, key: Tensor) -> bool:
        return any(key.data_ptr() == earlier.data_ptr() for earlier in self.keys)


def trace_attention(model: PreTrainedModel, name: str) -> AttentionTrace:
    """Run two tokens through `model`, write down its calls for attention, and number its attention modules in their order.

    Raises `UnsupportedModelError` if the forward pass fails.
    """
    recorder = _Recorder(list(model.named_modules()))
    bind_layers(model, (module for _, module in recorder.modules))
    ran: list[str] = []
    hooks = [
        module.register_forward_pre_hook(lambda *_, label=label: ran.append(label))
        for label, module in recorder.modules
        if isinstance(module, nn.Conv1d)
    ]
    device = model.get_input_embeddings().weight.device
    inputs = {
        "input_ids": torch.tensor([[1, 2]], device=device),
        "position_ids": torch.tensor([[0, 1]], device=device),
        "use_cache": False,
    }
    try:
        with torch.inference_mode(), slot_of(model).holding(recorder):
            logits = model(**inputs).logits
    except UnsupportedModelError:
        raise
    except Exception as error:  # noqa: BLE001 - a model that cannot run one packed row, for whatever reason, is refused
        raise UnsupportedModelError(name, f"its forward pass fails: {type(error).__name__}: {error}") from None
    finally:
        for hook in hooks:
            hook.remove()
        bind_layers(model, dict.fromkeys(recorder.order))
    return AttentionTrace(tuple(recorder.calls), int(logits.shape[-1]), tuple(dict.fromkeys(ran)))


def takes(model: PreTrainedModel, option: str) -> bool:
    """Whether the model's forward names `option` among its parameters."""
    return option in inspect.signature(model.forward).parameters


def _describe(
    name: str, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, options: dict[str, Any], *, shares_kv: bool
) -> AttentionCall:
    is_causal = options.get("is_causal")
    if is_causal is None:
        is_causal = getattr(module, "is_causal", True)
    unknown = (option for option, given in options.items() if option not in HONOURED | WITHOUT_EFFECT and given is not None)
    scaling = options["scaling"]
    return AttentionCall(
        module=name,
        batch=query.shape[0],
        query_heads=query.shape[1],
        kv_heads=key.shape[1],
        key_dim=key.shape[3],
        value_dim=value.shape[3],
        dtype=key.dtype,
        scale=None if scaling is None else float(scaling),
        window=options["sliding_window"],
        softcap=options["softcap"],
        has_sinks=options["s_aux"] is not None,
        is_causal=bool(is_causal),
        has_mask=options["attention_mask"] is not None,
        dropout=float(options["dropout"] or 0.0),
        other_options=tuple(sorted(unknown)),
        shares_kv=shares_kv,
    )
