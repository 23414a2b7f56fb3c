"""Rotary positions and the store of what they rotate, in plain torch: the twin of the Triton kernel that does both at once.

Before: a layer's projections. After: `paged_attention` of the same step. Always: queries are rotated into new memory, keys on
their way to their slots; what a store leaves alone, this does.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .input_checks import check_same_device, check_same_dtype
from .quantised import store_kv_quantised
from .reference import store_kv
from .shapes import KernelInputError, bind


@torch.no_grad()
def rope_store_kv(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cos: Tensor,
    sin: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slots: Tensor,
    *,
    k_scales: Tensor | None = None,
    v_scales: Tensor | None = None,
) -> Tensor:
    """q [T, Hq, Dk] with its positions, and k [T, Hkv, Dk] with theirs and v [T, Hkv, Dv] at `slots`.

    cos and sin [T, R], R even and at most Dk, are those of a token's position: of the first R numbers of a head, number i and
    number i + R / 2 are rotated with each other, by column i and column i + R / 2 (two halves, as transformers has them); the
    others stay. Caches, slots and scales as in `reference.store_kv`, or `quantised.store_kv_quantised` with scales. Raises
    `ShapeError` and `KernelInputError`.
    """
    check_rope(q, k, cos, sin, k_scales, v_scales)
    turned = rotated(k, cos, sin)
    if k_scales is not None and v_scales is not None:
        store_kv_quantised(turned, v, k_cache, v_cache, k_scales, v_scales, slots)
    else:
        store_kv(turned, v, k_cache, v_cache, slots)
    return rotated(q, cos, sin)


def check_rope(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, k_scales: Tensor | None = None, v_scales: Tensor | None = None
) -> None:
    """Refuse what is rotated by nothing that fits it."""
    sizes = bind("T Hq Dk", q=q).bind("T Hkv Dk", k=k).bind("T R", cos=cos, sin=sin)
    if sizes["R"] % 2 or sizes["R"] > sizes["Dk"]:
        raise KernelInputError(f"cos has R={sizes['R']}: must be even and at most Dk={sizes['Dk']}")
    if (k_scales is None) != (v_scales is None):
        raise KernelInputError("k_scales and v_scales: must both be given, or neither")
    check_same_dtype(q=q, k=k)
    check_same_dtype(cos=cos, sin=sin)
    check_same_device(q=q, k=k, cos=cos, sin=sin)


def rotated(rows: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """rows [T, H, D] in float32 and back."""
    width = cos.shape[1]
    turned, rest = rows[..., :width].float(), rows[..., width:]
    halves = turned.chunk(2, -1)
    across = torch.cat((-halves[1], halves[0]), -1)
    turned = turned * cos.float().unsqueeze(1) + across * sin.float().unsqueeze(1)
    return torch.cat((turned.to(rows.dtype), rest), -1)
