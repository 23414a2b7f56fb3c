"""Whole blocks moved about: the twins in plain torch of the Triton copies.

Before: a plan's `copies`, or blocks to swap out and in. After: the forward pass. Always: a pool is [N, bytes of a block] in any
dtype; blocks that are not named keep every byte.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .shapes import KernelInputError, bind


@torch.no_grad()
def copy_blocks(pool: Tensor, pairs: Tensor) -> None:
    """pool [N, E], E contiguous: block pairs[i, 0] to block pairs[i, 1], for pairs [C, 2] int32.

    No target is named twice or is a source of another pair. Raises `ShapeError` and `KernelInputError`.
    """
    check_blocks(pool, pairs=pairs)
    pool[pairs[:, 1].long()] = pool[pairs[:, 0].long()]


@torch.no_grad()
def gather_blocks(pool: Tensor, blocks: Tensor, out: Tensor) -> None:
    """out [C, E] becomes the blocks of pool [N, E] that blocks [C] int32 names."""
    check_blocks(pool, blocks=blocks, out=out)
    out.copy_(pool[blocks.long()])


@torch.no_grad()
def scatter_blocks(source: Tensor, blocks: Tensor, pool: Tensor) -> None:
    """The blocks of pool [N, E] that blocks [C] int32 names, each at most once, become the rows of source [C, E]."""
    check_blocks(pool, blocks=blocks, source=source)
    pool[blocks.long()] = source


def check_blocks(pool: Tensor, **others: Tensor) -> None:
    """Refuse shapes, dtypes, gaps and, on a CPU, ids that the three functions do not take."""
    sizes = bind("N E", pool=pool)
    for name, tensor in others.items():
        sizes.bind({"pairs": "C 2", "blocks": "C"}.get(name, "C E"), **{name: tensor})
        if name in ("pairs", "blocks"):
            if tensor.dtype != torch.int32 or not tensor.is_contiguous():
                raise KernelInputError(f"{name} has dtype {tensor.dtype}: must be torch.int32, contiguous")
            if tensor.device.type == "cpu" and tensor.numel() and not 0 <= int(tensor.min()) <= int(tensor.max()) < sizes["N"]:
                found = [int(tensor.min()), int(tensor.max())]
                raise KernelInputError(f"{name} holds ids from {found[0]} to {found[1]}: must be 0 to {sizes['N'] - 1}")
        elif tensor.dtype != pool.dtype:
            raise KernelInputError(f"{name} has dtype {tensor.dtype}: must be {pool.dtype}, the dtype of pool")
    for name, tensor in (("pool", pool), *others.items()):
        if tensor.dim() == 2 and tensor.shape[1] > 1 and tensor.stride(1) != 1:
            raise KernelInputError(f"{name} has stride {tensor.stride(1)} in its last dimension: must be 1")
