"""Linear layers by the core's products on a CPU, in the place of torch's.

Before: `linear_backend` chose the modules. After: the same modules, whose forward calls the core. Always: weights stay the
parameters that they were, in the memory where they were; what comes out for a row depends on no other row, to the last bit,
so a request answers alone as it does in any batch.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.utils.dlpack import to_dlpack  # type: ignore[attr-defined]

from .. import _core


def fits(tensor: Tensor) -> bool:
    """Whether the core multiplies with it: float32 on a CPU, no gaps in its rows."""
    return tensor.dtype == torch.float32 and tensor.device.type == "cpu" and tensor.stride(-1) == 1


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """As torch's `linear`, without a gradient: x [..., K], weight [N, K], bias [N], all float32 on a CPU."""
    rows = x.reshape(-1, x.shape[-1])
    out = x.new_empty(rows.shape[0], weight.shape[0])
    _core.cpu_linear(
        to_dlpack(rows),
        to_dlpack(weight),
        to_dlpack(out),
        bias=None if bias is None else to_dlpack(bias),
        threads=torch.get_num_threads(),
    )
    return out.view(*x.shape[:-1], weight.shape[0])


def gated(x: Tensor, gate: Tensor, up: Tensor, activation: str) -> Tensor:
    """activation(linear(x, gate)) * linear(x, up), where `activation` is silu or gelu_tanh; otherwise as `linear`."""
    rows = x.reshape(-1, x.shape[-1])
    out = x.new_empty(rows.shape[0], gate.shape[0])
    _core.cpu_gated(
        to_dlpack(rows),
        to_dlpack(gate),
        to_dlpack(up),
        to_dlpack(out),
        activation=activation,
        threads=torch.get_num_threads(),
    )
    return out.view(*x.shape[:-1], gate.shape[0])


class CoreLinear(nn.Linear):
    """A linear layer whose forward calls the core where it can: torch's own for other dtypes, devices and with a gradient."""

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 - torch calls it so
        """[..., in_features] to [..., out_features]."""
        if torch.is_grad_enabled() or not (fits(input) and fits(self.weight)):
            return super().forward(input)
        return linear(input, self.weight.detach(), None if self.bias is None else self.bias.detach())
