"""All decoder layers of a model in one call of the core.

Before: `core_layer` has joined every one of them. After: the first layer's forward runs them all, and the others hand on what
they are given. Always: that is done only in a model that hands each layer the very answer of the one before, and the same
positions, which is seen once when the layers are joined; a forward that does something else later fails, and answers nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils.dlpack import to_dlpack  # type: ignore[attr-defined]
from transformers import PreTrainedModel

from .. import _core
from .attention_bridge import slot_of

if TYPE_CHECKING:
    from .core_layer import Joined


class LayerStack:
    """The layers in their order, which is that of the KV memory's."""

    def __init__(self, layers: Sequence[Joined]) -> None:
        self._layers = list(layers)
        self._parameters = [parameter for joined in layers for parameter in joined.parameters]
        self._views: list[_core.CpuLayer] = []
        self._seen: list[int] = []  # addresses of the parameters that the views are of
        self._under_way: tuple[Any, Tensor, Tensor] | None = None  # context, answer and cosines

    def forward(self, number: int, context: Any, hidden: Tensor, cos: Tensor, sin: Tensor) -> Tensor | None:
        """What layer `number` answers to hidden [1, T, K]; None if the context cannot run whole layers.

        The first one's answer is that of the last: the others know it, and hand it on.
        """
        if number == 0:
            run = getattr(context, "run_layers", None)
            out = None if run is None else run(self.views(), hidden[0], cos[0], sin[0])
            if out is None:
                self._under_way = None
                return None
            answer: Tensor = out.unsqueeze(0)
            self._under_way = None if len(self._layers) == 1 else (context, answer, cos)
            return answer
        if self._under_way is None or self._under_way[0] is not context:
            return None
        _, answer, angles = self._under_way
        if hidden is not answer or cos is not angles:
            raise RuntimeError(f"layer {number} was not given the answer and the positions of the layer before")
        if number == len(self._layers) - 1:
            self._under_way = None
        return answer

    def views(self) -> list[_core.CpuLayer]:
        """The parameters for the core, where they are now."""
        addresses = [parameter.data_ptr() for parameter in self._parameters]
        if addresses != self._seen:
            self._views, self._seen = [view_of(joined) for joined in self._layers], addresses
        return self._views

    def passes_through(self, model: PreTrainedModel) -> bool:
        """Whether the model hands on between its layers what they answer, as it is."""
        probe = _Probe()
        device = model.get_input_embeddings().weight.device
        ids = torch.tensor([[1, 2]], device=device)
        with suppress(Exception), torch.inference_mode(), slot_of(model).holding(probe):
            model(input_ids=ids, position_ids=torch.tensor([[0, 1]], device=device), use_cache=False)
            return probe.calls == 1 and self._under_way is None
        return False

    def __getstate__(self) -> dict[str, Any]:
        """A copy makes views of its own parameters."""
        return {**self.__dict__, "_views": [], "_seen": [], "_under_way": None}


class _Probe:
    """A context that answers for all layers at once, and for none alone."""

    def __init__(self) -> None:
        self.calls = 0

    def run_layers(self, layers: Sequence[_core.CpuLayer], hidden: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """[T, K]"""
        self.calls += 1
        return torch.ones_like(hidden)

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, options: dict[str, Any]) -> Tensor:
        """Never asked in a model whose layers are all of the stack."""
        raise RuntimeError(f"layer {layer} ran by itself")


def view_of(joined: Joined) -> _core.CpuLayer:
    """A layer's parameters for the core, in the memory where they are."""

    def lend(tensors: Sequence[Tensor]) -> list[Any]:
        return [to_dlpack(tensor.detach()) for tensor in tensors]

    call = joined.call
    return _core.CpuLayer(
        lend([joined.norm, joined.second_norm]),
        lend(joined.projections),
        *lend([joined.output, joined.gate, joined.up, joined.down]),
        eps=[joined.eps, joined.second_eps],
        activation=joined.activation,
        scale=call.key_dim**-0.5 if call.scale is None else call.scale,
        window=call.window or 0,
        softcap=call.softcap or 0.0,
        biases=None if joined.biases is None else lend(joined.biases),
    )
