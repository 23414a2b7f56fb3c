"""Attention modules that leave the rotation of queries and keys to the kernel that stores the keys: one launch instead of ten.

Before: `loader` has a checked model on a GPU. After: the same modules, whose forward hands over queries and keys as they were
projected, wherever the context that runs can rotate them. Always: a module is changed only if its own forward and ours give the
same on random rows, angles and positions; with norms of queries or keys, scales that depend on positions, or other rotations
they do not, and it stays as it is. Outside of an engine, with a gradient, or on a backend without such a kernel it runs its own
forward.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ..kernels import rope
from .attention_bridge import LayerBinding, binding_of
from .front import Front, own_class, put_before, take_away
from .trace import AttentionCall, AttentionTrace

FAR_POSITIONS = (0, 3, 5000, 10**6, 10**8)
"""Of the rows that a module is checked on: some scale queries by where they stand. The angles are given by themselves."""
ERROR = {torch.float32: 1e-4}
"""Of our forward against the module's own, relative to its largest answer."""
ROUGH_ERROR = 3e-2
"""The same where numbers have two bytes: transformers rounds each product of a rotation, the kernel rounds once."""

_PROJECTIONS = {"q_proj", "k_proj", "v_proj", "o_proj"}


class RotatingForward(Front):
    """Goes before the class of an attention module: its forward while an engine runs the model."""

    KEY = "_blocktable_rotating"

    def forward(self, hidden_states: Tensor, *args: Any, **options: Any) -> Any:
        """The module's own where ours cannot run."""
        found = self._attend(hidden_states, args, options)
        return super().forward(hidden_states, *args, **options) if found is None else (found, None)

    def _attend(self, hidden_states: Tensor, args: tuple[Any, ...], options: dict[str, Any]) -> Tensor | None:
        call: AttentionCall = self.__dict__[self.KEY]
        binding, angles = binding_of(self), options.get("position_embeddings")
        attend = None if binding is None else getattr(binding.slot.current, "attend_rotated", None)
        if binding is None or attend is None or args or angles is None or len(hidden_states) != 1:
            return None
        # Of some models only a part of a head turns; a mask or a cache is none of ours.
        is_whole = angles[0].shape[-1] == call.key_dim
        others = (options.get("attention_mask"), options.get("past_key_values"))
        if torch.is_grad_enabled() or not is_whole or any(other is not None for other in others):
            return None
        widths = {"q_proj": call.key_dim, "k_proj": call.key_dim, "v_proj": call.value_dim}
        x = hidden_states[0]
        q, k, v = (getattr(self, name)(x).view(len(x), -1, width) for name, width in widths.items())
        named = {"scaling": call.scale, "sliding_window": call.window, "softcap": call.softcap, "s_aux": None}
        out: Tensor | None = attend(binding.layer, q, k, v, (angles[0][0], angles[1][0]), named)
        if out is None:
            return None
        projected: Tensor = self.o_proj(out.reshape(1, len(x), -1))  # type: ignore[operator]
        return projected


def rotate_in_store(model: PreTrainedModel, trace: AttentionTrace) -> int:
    """Change every attention module that can be; returns how many."""
    modules = dict(model.named_modules())
    count = 0
    for call in trace.calls:
        module = modules[call.module]
        if isinstance(module, RotatingForward) or not _may_rotate(module, call):
            continue
        put_before(module, RotatingForward, call)
        if _agrees(module, own_class(module), call):
            count += 1
        else:
            take_away(module)
    return count


def rotate_in_model(model: PreTrainedModel) -> None:
    """Let every attention module run its own forward again."""
    for module in model.modules():
        if isinstance(module, RotatingForward):
            take_away(module)


def _may_rotate(module: nn.Module, call: AttentionCall) -> bool:
    return {name for name, _ in module.named_children()} == _PROJECTIONS and not call.has_sinks and not call.shares_kv


@dataclass
class _Echo:
    """A context whose answer depends on every number of q, k, v and of the options; it rotates as the kernel's twin does."""

    met: bool = False

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, options: dict[str, Any]) -> Tensor:
        """[1, T, Hq, Dv]"""
        q, k, v = (rows[0].transpose(0, 1) for rows in (query, key, value))
        return self._answer(q, k, v, options).unsqueeze(0)

    def attend_rotated(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, angles: tuple[Tensor, Tensor], options: dict[str, Any]
    ) -> Tensor:
        """[T, Hq, Dv]"""
        self.met = True
        return self._answer(rope.rotated(q, *angles), rope.rotated(k, *angles), v, options)

    def _answer(self, q: Tensor, k: Tensor, v: Tensor, options: dict[str, Any]) -> Tensor:
        group = q.shape[1] // k.shape[1]
        k, v = (rows.float().repeat_interleave(group, 1) for rows in (k, v))
        scale = q.shape[-1] ** -0.5 if options["scaling"] is None else options["scaling"]
        score = (q.float() * k).sum(-1, keepdim=True) * scale
        extra = (options["sliding_window"] or 0) / 1000 + (options["softcap"] or 0) / 100
        answer: Tensor = (v * (1 + score + extra)).to(q.dtype)
        return answer


def _agrees(module: nn.Module, own: type[nn.Module], call: AttentionCall) -> bool:
    """Whether both forwards give the same; a module that cannot be called like this is none of ours."""
    binding: LayerBinding | None = binding_of(module)
    if binding is None:
        return False
    weight: Tensor = module.q_proj.weight  # type: ignore[assignment,union-attr]
    draw = torch.Generator().manual_seed(0)
    hidden = torch.randn(1, len(FAR_POSITIONS), weight.shape[1], generator=draw).to(weight)
    # Halves are alike in transformers' angles, but need not be in a kernel's: here they are not.
    angles = tuple(torch.randn(1, len(FAR_POSITIONS), call.key_dim, generator=draw).to(weight) for _ in range(2))
    positions = torch.tensor([FAR_POSITIONS], device=weight.device)
    options = {"position_embeddings": angles, "attention_mask": None, "position_ids": positions}
    echo = _Echo()
    with torch.inference_mode(), binding.slot.holding(echo):
        try:
            wanted = own.forward(module, hidden.clone(), **options)[0]
            got = module(hidden.clone(), **options)[0]
        except Exception:  # noqa: BLE001 - whatever it is, the module keeps its own forward
            return False
    if not (echo.met and isinstance(wanted, Tensor) and wanted.shape == got.shape):
        return False
    return bool((got - wanted).abs().max() <= ERROR.get(wanted.dtype, ROUGH_ERROR) * wanted.abs().max())
