"""Which implementation of the kernels a model runs on, chosen by device and dtype or by name.

Before: the engine's option `attention_backend`. After: `forward_context` calls what was chosen, at every layer. Always: a
backend that cannot run is refused when the engine is built, with the reason, never at the first step.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ..errors import InvalidInputError
from ..kernels import reference
from . import cpu_attention


@dataclass(frozen=True, slots=True)
class AttentionBackend:
    """One implementation of the two kernels, with the signatures of `kernels/reference.py`."""

    name: str
    store_kv: Callable[..., None]
    paged_attention: Callable[..., Tensor]


REFERENCE = AttentionBackend("reference", reference.store_kv, reference.paged_attention)
"""Plain torch: any device, any dtype."""
CPU = AttentionBackend("cpu", cpu_attention.store_kv, cpu_attention.paged_attention)
"""The core's SIMD kernels."""


def choose_backend(wanted: str, device: torch.device, dtype: torch.dtype) -> AttentionBackend:
    """`auto` is the fastest that knows device and dtype. Raises `InvalidInputError` for a name that does not."""
    on_cpu = device.type == "cpu"
    if wanted == "auto":
        return CPU if on_cpu and dtype in cpu_attention.DTYPES else REFERENCE
    if wanted == "reference":
        return REFERENCE
    if wanted != "cpu":
        raise InvalidInputError("attention_backend", wanted, "must be one of auto, cpu, reference")
    if not on_cpu:
        raise InvalidInputError("attention_backend", wanted, f"the model is on {device}: must be on the CPU")
    if dtype not in cpu_attention.DTYPES:
        known = ", ".join(str(one).removeprefix("torch.") for one in cpu_attention.DTYPES)
        raise InvalidInputError("attention_backend", wanted, f"the KV rows are {dtype}: must be one of {known}")
    return CPU
