"""Whose products the linear layers of a model use on a CPU: the core's, or torch's.

Before: `loader` has a checked model. After: the same modules over the same weights; those that the core multiplies are
`CoreLinear` until the model is given back. Always: only plain float32 linears on a CPU are touched, and no weight is moved,
copied or changed, so an output head stays tied to its embeddings.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn
from transformers import PreTrainedModel

from .. import _core
from ..errors import InvalidInputError
from .core_layer import join_layers, part_layers
from .cpu_linear import CoreLinear
from .trace import AttentionTrace

LINEAR_BACKENDS = ("auto", "cpu", "torch")

_CHOICE = "_blocktable_linears"


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearChoice:
    """What the linear layers of a model run on."""

    backend: str
    """`cpu` (the core) or `torch`."""
    layers: int
    """How many run on the core."""
    joined: int = 0
    """Decoder layers that run in two calls of the core."""

    def __str__(self) -> str:
        if self.backend == "torch":
            return "on torch's products"
        return f"{self.layers} on the core's products, {self.joined} decoder layers joined"


def choose_linears(model: PreTrainedModel, wanted: str = "auto", trace: AttentionTrace | None = None) -> LinearChoice:
    """Choose and apply, for every engine of this model; the same wish again changes nothing.

    `auto`: the core where this processor has instructions for it and the model has linear layers that it can multiply. With the
    `trace` of an attached model its decoder layers are joined too (`core_layer`). Raises `InvalidInputError` for another name,
    and for `cpu` without such linear layers.
    """
    if wanted not in LINEAR_BACKENDS:
        raise InvalidInputError("linear_backend", wanted, f"must be one of {', '.join(LINEAR_BACKENDS)}")
    before: tuple[str, LinearChoice] | None = model.__dict__.get(_CHOICE)
    if before is not None and before[0] == wanted:
        return before[1]
    choice = _apply(model, wanted, trace)
    model.__dict__[_CHOICE] = (wanted, choice)
    return choice


def _apply(model: PreTrainedModel, wanted: str, trace: AttentionTrace | None) -> LinearChoice:
    use_torch_linears(model)
    plain = [module for module in model.modules() if _is_plain(module)]
    if wanted == "cpu" and not plain:
        raise InvalidInputError("linear_backend", wanted, "the model has no float32 linear layers on a CPU")
    if wanted == "torch" or not plain or (wanted == "auto" and _core.cpu_instructions()[0] == "portable"):
        return LinearChoice(backend="torch", layers=0)
    for module in plain:
        module.__class__ = CoreLinear
    joined = 0 if trace is None else join_layers(model, trace)
    return LinearChoice(backend="cpu", layers=len(plain), joined=joined)


def use_torch_linears(model: PreTrainedModel) -> None:
    """Let every linear layer be torch's own again, and every decoder layer run its own forward."""
    model.__dict__.pop(_CHOICE, None)
    part_layers(model)
    for module in model.modules():
        if type(module) is CoreLinear:
            setattr(module, "__class__", nn.Linear)  # noqa: B010 - mypy takes no assignment of a wider class


def _is_plain(module: nn.Module) -> bool:
    """A linear of torch itself (no subclass that packs its weights) in float32 on a CPU."""
    if type(module) is not nn.Linear:
        return False
    weight = module.weight
    return type(weight) is nn.Parameter and weight.dtype == torch.float32 and weight.device.type == "cpu"
