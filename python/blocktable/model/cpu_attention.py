"""The kernels of the CPU: the core's SIMD attention and store, with the signatures of their twins in `kernels/reference.py`.

Before: a layer's new queries, keys and values on a CPU. After: the output projection. Always: keys and values are read where
they lie in the pool; the threads are those of torch's own pool. What these kernels do not know (float64, ALiBi) goes to the
twin.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.dlpack import to_dlpack  # type: ignore[attr-defined]

from .. import _core
from ..kernels import reference
from ..kernels.attention_batch import AttentionBatch
from ..kernels.input_checks import check_options
from ..kernels.shapes import KernelInputError

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def store_kv(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor) -> None:
    """As `reference.store_kv`."""
    if k.dtype not in DTYPES:
        reference.store_kv(k, v, k_cache, v_cache, slots)
        return
    k, v = _with_whole_rows(k), _with_whole_rows(v)
    tensors = [_lend(tensor) for tensor in (k, v, k_cache, v_cache, slots.contiguous())]
    try:
        _core.cpu_store_kv(*tensors, threads=torch.get_num_threads())
    except ValueError as error:
        raise KernelInputError(str(error)) from None


def paged_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    batch: AttentionBatch,
    *,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    slopes: Tensor | None = None,
    instructions: str | None = None,
) -> Tensor:
    """As `reference.paged_attention`; `instructions` names one of `_core.cpu_instructions()`, None = the fastest."""
    if q.dtype not in DTYPES or slopes is not None:
        options: dict[str, Any] = {"scale": scale, "window": window, "softcap": softcap, "sinks": sinks, "slopes": slopes}
        return reference.paged_attention(q, k_cache, v_cache, batch, **options)
    check_options(batch, k_cache.shape[2] if k_cache.dim() == 4 else 0, scale, window, softcap)
    q = _with_whole_rows(q)
    out = q.new_empty(*q.shape[:-1], v_cache.shape[-1])
    tensors = [_lend(tensor) for tensor in (q, k_cache, v_cache, out, *batch.integers())]
    try:
        _core.cpu_attention(
            *tensors,
            scale=scale,
            window=window,
            softcap=softcap,
            sinks=None if sinks is None else _lend(sinks.float().contiguous()),
            threads=torch.get_num_threads(),
            instructions=instructions,
        )
    except ValueError as error:
        raise KernelInputError(str(error)) from None
    return out


def run_layers(
    layers: Sequence[_core.CpuLayer],
    hidden: Tensor,
    cos: Tensor,
    sin: Tensor,
    pages: Sequence[tuple[Tensor, Tensor]],
    tables: Sequence[tuple[Tensor, ...]],
    steps: Sequence[int],
) -> Tensor:
    """The rows hidden [T, K] through whole decoder layers: [T, K], all float32.

    cos and sin [T, D] are those of every layer; for each of them `pages` has its caches, and `steps` which of `tables` it
    follows: block_tables, query_starts, seq_lens and slots.
    """
    out = torch.empty_like(hidden)
    try:
        _core.cpu_layers(
            _lend(hidden),
            _lend(cos),
            _lend(sin),
            _lend(out),
            layers,
            [(to_dlpack(k), to_dlpack(v)) for k, v in pages],
            [(_lend(table), _lend(starts), _lend(lens), _lend(slots)) for table, starts, lens, slots in tables],
            steps,
            threads=torch.get_num_threads(),
        )
    except ValueError as error:
        raise KernelInputError(str(error)) from None
    return out


def _with_whole_rows(tensor: Tensor) -> Tensor:
    """The same numbers with no gaps in the last dimension."""
    return tensor if tensor.stride(-1) == 1 or tensor.shape[-1] == 1 else tensor.contiguous()


def _lend(tensor: Tensor) -> Any:
    """A view for the core, without a copy; it holds the memory until it is dropped."""
    if tensor.device.type != "cpu":
        raise KernelInputError(f"a tensor {list(tensor.shape)} is on {tensor.device}: must be on the CPU")
    return to_dlpack(tensor.detach())
