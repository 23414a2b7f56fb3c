"""Whole blocks copied, gathered and scattered, in Triton: copy-on-write, and swapping out and in.

Before: a plan's copies. After: the forward pass. Always: what the twins in `block_moves.py` promise; a launch moves all layers
of its blocks, in pieces of 16 bytes a lane; offsets are 64-bit.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .block_moves import check_blocks
from .bound_launch import KernelLaunch, Launcher

PIECE = 4096
"""Numbers that one program moves."""


@triton.jit
def _move(from_ptr, to_ptr, from_ids_ptr, to_ids_ptr, id_step, size, from_row, to_row, PIECE: tl.constexpr):
    """One piece of one block; ids that are not given are the number of the program."""
    number = tl.program_id(0).to(tl.int64)
    source = number
    target = number
    if from_ids_ptr is not None:
        source = tl.load(from_ids_ptr + number * id_step).to(tl.int64)
    if to_ids_ptr is not None:
        target = tl.load(to_ids_ptr + number * id_step).to(tl.int64)
    at = tl.program_id(1) * PIECE + tl.arange(0, PIECE)
    mask = at < size
    numbers = tl.load(from_ptr + source * from_row + at, mask=mask, other=0)
    tl.store(to_ptr + target * to_row + at, numbers, mask=mask)


@torch.no_grad()
def copy_blocks(pool: Tensor, pairs: Tensor, *, launch: Launcher | None = None) -> None:
    """As `block_moves.copy_blocks`."""
    check_blocks(pool, pairs=pairs)
    _run(pool, pool, pairs, pairs[:, 1:], 2, len(pairs), launch)


@torch.no_grad()
def gather_blocks(pool: Tensor, blocks: Tensor, out: Tensor, *, launch: Launcher | None = None) -> None:
    """As `block_moves.gather_blocks`."""
    check_blocks(pool, blocks=blocks, out=out)
    _run(pool, out, blocks, None, 1, len(blocks), launch)


@torch.no_grad()
def scatter_blocks(source: Tensor, blocks: Tensor, pool: Tensor, *, launch: Launcher | None = None) -> None:
    """As `block_moves.scatter_blocks`."""
    check_blocks(pool, blocks=blocks, source=source)
    _run(source, pool, None, blocks, 1, len(blocks), launch)


def _run(
    source: Tensor, to: Tensor, sources: Tensor | None, targets: Tensor | None, step: int, count: int, launch: Launcher | None
) -> None:
    size = source.shape[1]
    if not count or not size:
        return
    arguments = (source, to, sources, targets, step, size, source.stride(0), to.stride(0))
    grid = (count, triton.cdiv(size, PIECE))
    constants = {"PIECE": PIECE, "num_warps": 8}
    KernelLaunch(_move, grid, arguments, constants).run(launch)
