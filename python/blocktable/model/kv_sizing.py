"""How many KV blocks there are, and why so many.

Before: the user's `num_blocks`, `kv_cache_memory_bytes` or `memory_share`, and the model's geometry. After: `kv_memory` takes
exactly `total_bytes`. Always: nothing is allocated here, and what cannot be is refused with the numbers.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..errors import InvalidInputError
from .geometry import KVGeometry
from .host_memory import available_host_bytes

MIN_BLOCKS = 2
"""The null block, and one to use."""
MAX_BLOCKS = 2**27 - 1
"""As many as the free queue of the core can name."""
DEFAULT_SHARE = {"cuda": 0.9, "cpu": 0.5}
"""Of free memory. What is left is for activations, and on a CPU for everybody else."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KVSizing:
    """The size of the KV memory and how it was chosen."""

    num_blocks: int
    """Blocks in all, the null block among them."""
    block_size: int
    """Tokens a block."""
    bytes_per_block: int
    """Of one block: the layers of one group."""
    chosen_by: str
    """`num_blocks`, `kv_cache_memory_bytes`, `memory_share`, or `default share of memory`."""
    num_groups: int = 1
    """Groups of layers; a token takes a row in a block of each."""
    padding: float = 0.0
    """Share of the bytes that holds nothing, since the groups are not equally large."""
    available_bytes: int | None
    """Free memory of the device when this was chosen; None where the system does not say."""

    @property
    def total_bytes(self) -> int:
        """Bytes of the one allocation."""
        return self.num_blocks * self.bytes_per_block

    @property
    def num_tokens(self) -> int:
        """Tokens that fit if every group keeps them all: the null block holds none."""
        return (self.num_blocks - 1) // self.num_groups * self.block_size

    def __str__(self) -> str:
        free = "" if self.available_bytes is None else f" of {_mebibytes(self.available_bytes)} free"
        groups = "" if self.num_groups == 1 else f" in {self.num_groups} groups, {self.padding:.1%} of them padding,"
        return (
            f"{self.num_blocks} KV blocks of {self.block_size} tokens{groups} ({self.num_tokens} tokens), "
            f"{_mebibytes(self.total_bytes)}{free}, chosen by {self.chosen_by}"
        )


def size_kv(
    geometry: KVGeometry,
    block_size: int,
    device: torch.device,
    *,
    num_blocks: int | None = None,
    kv_cache_memory_bytes: int | None = None,
    memory_share: float | None = None,
) -> KVSizing:
    """Choose the number of blocks: `num_blocks` if given, else what fits in `kv_cache_memory_bytes`, else in a share of memory.

    The share is of what is free now: on CUDA of the device's free memory, on a CPU of what the machine and its control
    groups have left. Raises `InvalidInputError` for fewer than two blocks, more than ids can number, or more than is free.
    """
    if block_size < 1:
        raise InvalidInputError("block_size", block_size, "must be at least 1")
    per_block = geometry.bytes_per_block(block_size)
    free = available_bytes(device)
    value: float
    if num_blocks is not None:
        field, value, blocks = "num_blocks", num_blocks, num_blocks
    elif kv_cache_memory_bytes is not None:
        field, value, blocks = "kv_cache_memory_bytes", kv_cache_memory_bytes, kv_cache_memory_bytes // per_block
    else:
        field, value, blocks = _by_share(memory_share, free, per_block, device)
    _check_blocks(field, value, blocks, per_block, free)
    chosen_by = field if field != "memory_share" or memory_share is not None else "default share of memory"
    return KVSizing(
        num_blocks=blocks,
        block_size=block_size,
        bytes_per_block=per_block,
        num_groups=len(geometry.groups),
        padding=geometry.padding,
        chosen_by=chosen_by,
        available_bytes=free,
    )


def available_bytes(device: torch.device) -> int | None:
    """Memory of `device` that can still be taken; None where the system does not say."""
    if device.type != "cuda":
        return available_host_bytes()
    free, _ = torch.cuda.mem_get_info(device)
    # torch keeps what it has freed; that is free for us too.
    return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)


def _by_share(share: float | None, free: int | None, per_block: int, device: torch.device) -> tuple[str, float, int]:
    chosen = DEFAULT_SHARE[device.type] if share is None else share
    if not 0 < chosen <= 1:
        raise InvalidInputError("memory_share", chosen, "must be above 0 and at most 1")
    if free is None:
        raise InvalidInputError("memory_share", chosen, "this system does not say how much memory is free: give num_blocks")
    return "memory_share", chosen, min(int(free * chosen) // per_block, MAX_BLOCKS)


def _check_blocks(field: str, value: float, blocks: int, per_block: int, free: int | None) -> None:
    if blocks < MIN_BLOCKS:
        bound = f"must be at least {MIN_BLOCKS}" if field == "num_blocks" else f"gives {blocks} KV blocks of {per_block} bytes"
        raise InvalidInputError(field, value, f"{bound}: {MIN_BLOCKS} blocks are needed, one to use and the null block")
    if blocks > MAX_BLOCKS:
        raise InvalidInputError(field, value, f"gives {blocks} KV blocks: at most {MAX_BLOCKS} can be numbered")
    if free is not None and blocks * per_block > free:
        raise InvalidInputError(
            field,
            value,
            f"needs {blocks * per_block} bytes ({blocks} KV blocks of {per_block}): at most {free} are free, "
            f"which is {free // per_block} blocks",
        )


def _mebibytes(count: int) -> str:
    return f"{count / 2**20:.1f} MiB"
