"""Which implementation of the kernels a model runs on, chosen by device and dtype or by name.

Before: the engine's option `attention_backend`. After: `forward_context` calls what was chosen, at every layer. Always: a
backend that cannot run is refused when the engine is built, with the reason, never at the first step.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from ..errors import InvalidInputError
from ..kernels import reference
from ..kernels.launch_table import attention_launch, target_of
from ..kernels.shapes import KernelInputError
from . import cpu_attention

if TYPE_CHECKING:
    from .geometry import KVGeometry


class CascadeRule(NamedTuple):
    """When shared prefixes are attended once for all."""

    positions: int  # a shorter prefix is not looked for
    bytes: int  # so many less must be read in a layer
    bytes_instead_of_graph: int  # or so many, where the step would be a captured graph otherwise


@dataclass(frozen=True, slots=True)
class AttentionBackend:
    """One implementation of the two kernels, with the signatures of `kernels/reference.py`."""

    name: str
    store_kv: Callable[..., None]
    paged_attention: Callable[..., Tensor]
    cascade: CascadeRule | None = None
    """When single queries are told what they share; None: never."""
    rope_store_kv: Callable[..., Tensor] | None = None
    """As `kernels/rope.py`; None: queries and keys come rotated."""
    run_layers: Callable[..., Tensor] | None = None
    """As `cpu_attention.run_layers`; None: it knows no whole layers."""
    for_graph: Callable[[], AttentionBackend] | None = None
    """The same kernels with memory of their own, for one pass of a captured graph; None: they cannot be captured."""


REFERENCE = AttentionBackend("reference", reference.store_kv, reference.paged_attention)
"""Plain torch: any device, any dtype."""
CPU = AttentionBackend("cpu", cpu_attention.store_kv, cpu_attention.paged_attention, run_layers=cpu_attention.run_layers)
"""The core's SIMD kernels."""


NAMES = ("cpu", "triton", "reference")
"""From the fastest on; `auto` is the first that can run."""


def choose_backend(wanted: str, device: torch.device, geometry: KVGeometry) -> AttentionBackend:
    """The backend of this name for a model of this geometry. Raises `InvalidInputError` for one that cannot run it."""
    if wanted == "auto":
        wanted = next(name for name in NAMES if _objection(name, device, geometry) is None)
    if wanted not in NAMES:
        raise InvalidInputError("attention_backend", wanted, f"must be one of auto, {', '.join(NAMES)}")
    objection = _objection(wanted, device, geometry)
    if objection is not None:
        raise InvalidInputError("attention_backend", wanted, objection)
    return _triton() if wanted == "triton" else {"cpu": CPU, "reference": REFERENCE}[wanted]


def _objection(name: str, device: torch.device, geometry: KVGeometry) -> str | None:
    """Why the backend cannot run; None if it can."""
    if name == "reference":
        return None
    if name == "cpu":
        if device.type != "cpu":
            return f"the model is on {device}: must be on the CPU"
        known = ", ".join(str(one).removeprefix("torch.") for one in cpu_attention.DTYPES)
        return None if geometry.dtype in cpu_attention.DTYPES else f"the KV rows are {geometry.dtype}: must be one of {known}"
    if device.type != "cuda":
        return f"the model is on {device}: must be on a GPU of CUDA or ROCm"
    if find_spec("triton") is None:
        return "Triton is not installed"
    widest = max((max(layer.key_dim, layer.value_dim) for layer in geometry.layers), default=1)
    try:
        attention_launch(target_of(torch.empty(0, device=device)), geometry.dtype, widest, is_decode=True)
    except KernelInputError as error:
        return str(error)
    return None


def _triton() -> AttentionBackend:
    """Loaded when it is chosen: the other backends need no Triton."""
    from . import gpu_attention

    kernels = gpu_attention.GpuKernels()
    return AttentionBackend(
        "triton",
        kernels.store_kv,
        kernels.paged_attention,
        gpu_attention.CASCADE,
        gpu_attention.rope_store_kv,
        for_graph=_triton,
    )
