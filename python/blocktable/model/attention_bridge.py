"""The one function that transformers calls for attention, and how a model comes to call it.

Before: `loader` attaches a model. After: every attention module of the model asks the context in the model's own slot.
Always: the function keeps nothing between calls; it finds its context through the binding on the module that calls it.
There is no entry in transformers' mask interface under this name, so models build no mask (its documented way for
implementations that need none) and sequences of a packed row are kept apart by the context alone.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel

from ..errors import BlocktableError, UnsupportedModelError
from .forward_context import ContextSlot

IMPLEMENTATION = "blocktable_paged"
"""Our name among transformers' attention implementations."""

_BINDING = "_blocktable_binding"
_SLOT = "_blocktable_slot"


@dataclass(frozen=True, slots=True)
class LayerBinding:
    """What hangs on one attention module: which layer of the KV memory it is, and where its context lies."""

    layer: int
    slot: ContextSlot


def paged_attention_interface(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **rest: Any,
) -> tuple[Tensor, None]:
    """Attention of one layer, by transformers' calling convention: ([1, T, Hq, Dv], None).

    query [1, Hq, T, Dk] · key [1, Hkv, T, Dk] · value [1, Hkv, T, Dv], positions already applied. Hkv is what the model
    hands over, never what its configuration says (a shard of a model holds fewer).
    """
    binding = binding_of(module)
    context = None if binding is None else binding.slot.current
    if binding is None or context is None:
        raise BlocktableError(
            f"{type(module).__name__} was run outside of an engine: this model is attached to blocktable; "
            "run it through its engine, or give it back first with blocktable.model.loader.unwrap_model"
        )
    options = {
        "attention_mask": attention_mask,
        "scaling": scaling,
        "dropout": dropout,
        "sliding_window": sliding_window,
        "softcap": softcap,
        "s_aux": s_aux,
        **rest,
    }
    return context.attend(binding.layer, query, key, value, options), None


AttentionInterface.register(IMPLEMENTATION, paged_attention_interface)


def use_paged_attention(model: PreTrainedModel, name: str) -> None:
    """Let every part of `model` call our function. Raises `UnsupportedModelError` where the model cannot be told to."""
    set_implementation(model, IMPLEMENTATION, name)
    if model.config._attn_implementation != IMPLEMENTATION:
        raise UnsupportedModelError(name, "its attention does not go through transformers' attention interface")


def set_implementation(model: PreTrainedModel, implementation: str, name: str) -> None:
    """Set transformers' attention implementation. Raises `UnsupportedModelError` if a part of the model refuses it."""
    try:
        model.set_attn_implementation(implementation)
    except (ValueError, KeyError, ImportError, AttributeError) as error:
        raise UnsupportedModelError(name, f"it refuses the attention implementation {implementation!r}: {error}") from None


def slot_of(model: PreTrainedModel) -> ContextSlot:
    """The model's slot, made and hung on the model at the first call."""
    slot: ContextSlot | None = model.__dict__.get(_SLOT)
    if slot is None:
        slot = ContextSlot()
        model.__dict__[_SLOT] = slot
    return slot


def bind_layers(model: PreTrainedModel, modules: Iterable[nn.Module]) -> None:
    """Make `modules` the model's layers 0, 1, ... and no other module one."""
    unbind_layers(model)
    slot = slot_of(model)
    for layer, module in enumerate(modules):
        module.__dict__[_BINDING] = LayerBinding(layer, slot)


def binding_of(module: nn.Module) -> LayerBinding | None:
    """What hangs on `module`; None if it is no attention module of an attached model."""
    binding: LayerBinding | None = module.__dict__.get(_BINDING)
    return binding


def unbind_layers(model: PreTrainedModel) -> None:
    """Take every binding off the model's modules."""
    for module in model.modules():
        module.__dict__.pop(_BINDING, None)


def forget_slot(model: PreTrainedModel) -> None:
    """Take the slot off the model."""
    model.__dict__.pop(_SLOT, None)
