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
from .cpu_linear import CoreLinear

LINEAR_BACKENDS = ("auto", "cpu", "torch")


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearChoice:
    """What the linear layers of a model run on."""

    backend: str
    """`cpu` (the core) or `torch`."""
    layers: int
    """How many run on the core."""

    def __str__(self) -> str:
        return f"{self.layers} on the core's products" if self.backend == "cpu" else "on torch's products"


def choose_linears(model: PreTrainedModel, wanted: str = "auto") -> LinearChoice:
    """Choose and apply, for every engine of this model. `auto`: the core where this processor has instructions for it and the
    model has linear layers that it can multiply. Raises `InvalidInputError` for another name, and for `cpu` without one.
    """
    if wanted not in LINEAR_BACKENDS:
        raise InvalidInputError("linear_backend", wanted, f"must be one of {', '.join(LINEAR_BACKENDS)}")
    use_torch_linears(model)
    plain = [module for module in model.modules() if _is_plain(module)]
    if wanted == "cpu" and not plain:
        raise InvalidInputError("linear_backend", wanted, "the model has no float32 linear layers on a CPU")
    if wanted == "torch" or not plain or (wanted == "auto" and _core.cpu_instructions()[0] == "portable"):
        return LinearChoice(backend="torch", layers=0)
    for module in plain:
        module.__class__ = CoreLinear
    return LinearChoice(backend="cpu", layers=len(plain))


def use_torch_linears(model: PreTrainedModel) -> None:
    """Let every linear layer be torch's own again."""
    for module in model.modules():
        if type(module) is CoreLinear:
            setattr(module, "__class__", nn.Linear)  # noqa: B010 - mypy takes no assignment of a wider class


def _is_plain(module: nn.Module) -> bool:
    """A linear of torch itself (no subclass that packs its weights) in float32 on a CPU."""
    if type(module) is not nn.Linear:
        return False
    weight = module.weight
    return type(weight) is nn.Parameter and weight.dtype == torch.float32 and weight.device.type == "cpu"
