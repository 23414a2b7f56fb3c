"""Decoder layers in two calls of the core, one before their attention and one after it, in the place of some thirty of torch.

Before: `linear_backend` runs a model's linear layers on the core. After: the same layers, whose forward is joined while an
engine runs the model; where all of them are, and the context can, `layer_stack` runs them in one call. Always: a layer is
joined only if its joined forward gives what its own gives, on random rows and positions; whatever else it may do (scaled
residuals, norms in other places, other rotations) shows there, and then it stays as it is. Outside of an engine, with a
gradient, or in another dtype, a joined layer runs its own forward.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.dlpack import to_dlpack  # type: ignore[attr-defined]
from transformers import PreTrainedModel

from .. import _core
from .attention_bridge import binding_of
from .cpu_linear import CoreLinear, fits
from .front import Front, own_class, put_before, take_away
from .layer_stack import LayerStack
from .trace import AttentionCall, AttentionTrace

ACTIVATIONS = ("silu", "gelu_tanh")
CHECKED_ROWS = 5
ERROR = 1e-4
"""Of a joined layer against itself, relative to its largest answer; rounding gives about 1e-6."""

_STACK = "_blocktable_stack"
_PARTS = {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}
_PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj")


@dataclass(frozen=True, slots=True)
class Joined:
    """What the two calls of a layer need of it: its parameters, the very ones, and what its attention is called with."""

    norm: nn.Parameter
    eps: float
    projections: tuple[nn.Parameter, ...]
    """Of q, k and v."""
    biases: tuple[nn.Parameter, ...] | None
    output: nn.Parameter
    second_norm: nn.Parameter
    second_eps: float
    gate: nn.Parameter
    up: nn.Parameter
    down: nn.Parameter
    activation: str
    call: AttentionCall

    @property
    def parameters(self) -> tuple[nn.Parameter, ...]:
        """All of them."""
        norms = (self.norm, self.second_norm)
        return (*norms, *self.projections, *(self.biases or ()), self.output, self.gate, self.up, self.down)

    def run(self, attention: nn.Module, hidden: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """hidden [1, T, K], cos and sin [1, T, D] to [1, T, K], through the context that `attention` is bound to."""
        binding = binding_of(attention)
        context = None if binding is None else binding.slot.current
        if binding is None or context is None:
            raise RuntimeError("a joined layer runs inside of an engine only")
        call, threads, x = self.call, torch.get_num_threads(), hidden[0]
        widths = (call.query_heads * call.key_dim, call.kv_heads * call.key_dim, call.kv_heads * call.value_dim)
        rows = x.new_empty(x.shape[0], sum(widths))
        _core.cpu_before_attention(
            *map(_lend, (x, self.norm, *self.projections, cos[0], sin[0], rows)),
            eps=self.eps,
            biases=None if self.biases is None else (_lend(self.biases[0]), _lend(self.biases[1]), _lend(self.biases[2])),
            threads=threads,
        )
        parts = zip(rows.split_with_sizes(widths, 1), (call.key_dim, call.key_dim, call.value_dim))
        q, k, v = (part.view(x.shape[0], -1, width).transpose(0, 1).unsqueeze(0) for part, width in parts)
        options = {"scaling": call.scale, "sliding_window": call.window, "softcap": call.softcap, "s_aux": None}
        attended = context.attend(binding.layer, q, k, v, options).view(x.shape[0], -1)
        out = torch.empty_like(x)
        _core.cpu_after_attention(
            *map(_lend, (attended, x, self.output, self.second_norm, self.gate, self.up, self.down, out)),
            eps=self.second_eps,
            activation=self.activation,
            threads=threads,
        )
        return out.unsqueeze(0)


def _lend(tensor: Tensor) -> Any:
    return to_dlpack(tensor.detach())


class JoinedForward(Front):
    """Goes before the class of a decoder layer: its forward while an engine runs the model."""

    KEY = "_blocktable_joined"

    def forward(self, hidden_states: Tensor, *args: Any, **options: Any) -> Any:
        """The layer's own where the joined one cannot run."""
        joined: Joined = self.__dict__[self.KEY]
        attention: nn.Module = self.self_attn  # type: ignore[assignment]
        binding = binding_of(attention)
        positions = options.get("position_embeddings")
        if (
            binding is None
            or binding.slot.current is None
            or positions is None
            or positions[0].shape[-1] != joined.call.key_dim  # of some models only a part of a head turns
            or torch.is_grad_enabled()
            or hidden_states.shape[0] != 1
            or not (fits(hidden_states) and fits(joined.norm))
        ):
            return super().forward(hidden_states, *args, **options)
        stack: LayerStack | None = self.__dict__.get(_STACK)
        if stack is not None:
            answer = stack.forward(binding.layer, binding.slot.current, hidden_states, *positions)
            if answer is not None:
                return answer
        return joined.run(attention, hidden_states, *positions)


def join_layers(model: PreTrainedModel, trace: AttentionTrace) -> int:
    """Join every decoder layer that can be; returns how many. Its linear layers run on the core already."""
    modules = dict(model.named_modules())
    count, stack = 0, []
    for call in trace.calls:
        layer = modules[call.module.rpartition(".")[0]]
        joined = _read(layer, call)
        if joined is None or isinstance(layer, JoinedForward):
            continue
        put_before(layer, JoinedForward, joined)
        if _agrees(layer, own_class(layer), joined):
            count += 1
            stack.append(layer)
        else:
            take_away(layer)
    if stack and len(stack) == len(trace.calls):
        _stack(model, stack)
    return count


def _stack(model: PreTrainedModel, layers: list[nn.Module]) -> None:
    """Let all layers run in one call, if nothing happens between them."""
    stack = LayerStack([layer.__dict__[JoinedForward.KEY] for layer in layers])
    for layer in layers:
        layer.__dict__[_STACK] = stack
    if not stack.passes_through(model):
        for layer in layers:
            del layer.__dict__[_STACK]


def part_layers(model: PreTrainedModel) -> None:
    """Let every layer run its own forward again."""
    for module in model.modules():
        if isinstance(module, JoinedForward):
            module.__dict__.pop(_STACK, None)
            take_away(module)


def _read(layer: nn.Module, call: AttentionCall) -> Joined | None:
    """The parts of a layer that is built like Llama's; None for another, and for a call that the two halves do not know."""
    if {name for name, _ in layer.named_children()} != _PARTS or call.has_sinks or call.shares_kv:
        return None
    parts = dict(layer.named_modules())
    linears = [parts.get(f"self_attn.{name}") for name in _PROJECTIONS]
    linears += [parts.get(f"mlp.{name}") for name in ("gate_proj", "up_proj", "down_proj")]
    norms = [parts["input_layernorm"], parts["post_attention_layernorm"]]
    eps = [getattr(norm, "variance_epsilon", None) for norm in norms]
    inside = {name for name, _ in parts["self_attn"].named_children()}
    if inside != set(_PROJECTIONS) or not all(type(linear) is CoreLinear for linear in linears) or None in eps:
        return None
    weights: list[Any] = [linear.weight for linear in linears if linear is not None]
    biases: list[Any] = [linear.bias for linear in linears if linear is not None]
    has_biases = all(bias is not None for bias in biases[:3])
    if any(bias is not None for bias in (biases[3:] if has_biases else biases)):
        return None
    activation = _activation(getattr(parts["mlp"], "act_fn", None))
    if activation is None or any(len(dict(norm.named_parameters())) != 1 for norm in norms):
        return None
    return Joined(
        norm=norms[0].weight,
        eps=float(eps[0]),  # type: ignore[arg-type]
        projections=tuple(weights[:3]),
        biases=tuple(biases[:3]) if has_biases else None,
        output=weights[3],
        second_norm=norms[1].weight,
        second_eps=float(eps[1]),  # type: ignore[arg-type]
        gate=weights[4],
        up=weights[5],
        down=weights[6],
        activation=activation,
        call=call,
    )


def _activation(function: Any) -> str | None:
    """The core's name of a function, found by what it answers."""
    x = torch.linspace(-4, 4, 9)
    known = (nn.functional.silu(x), nn.functional.gelu(x, approximate="tanh"))
    if callable(function):
        for name, answers in zip(ACTIVATIONS, known):
            if torch.allclose(function(x), answers, atol=1e-6):
                return name
    return None


class _Echo:
    """A context whose answer depends on every number of q, k and v."""

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, options: dict[str, Any]) -> Tensor:
        """[1, T, Hq, Dv]"""
        group = query.shape[1] // key.shape[1]
        key, value = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
        score = (query * key).sum(-1, keepdim=True) * key.shape[-1] ** -0.5
        answer: Tensor = (value * (1 + score)).transpose(1, 2).contiguous()
        return answer


def _agrees(layer: nn.Module, own: type[nn.Module], joined: Joined) -> bool:
    """Whether both forwards give the same; a layer that cannot be called like this is none of ours."""
    binding = binding_of(layer.self_attn)  # type: ignore[arg-type]
    if binding is None:
        return False
    draw = torch.Generator().manual_seed(0)
    hidden = torch.randn(1, CHECKED_ROWS, joined.norm.shape[0], generator=draw)
    cos, sin = (torch.randn(1, CHECKED_ROWS, joined.call.key_dim, generator=draw) for _ in range(2))
    options = {
        "attention_mask": None,
        "position_ids": torch.arange(CHECKED_ROWS)[None],
        "position_embeddings": (cos, sin),
        "use_cache": False,
    }
    with torch.inference_mode(), binding.slot.holding(_Echo()):
        try:
            wanted = own.forward(layer, hidden.clone(), **options)
            got = layer(hidden.clone(), **options)
        except Exception:  # noqa: BLE001 - whatever it is, the layer keeps its own forward
            return False
    if not (isinstance(wanted, Tensor) and wanted.shape == got.shape):
        return False
    return bool((got - wanted).abs().max() <= ERROR * wanted.abs().max())
