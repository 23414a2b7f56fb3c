"""torch's own ways of attending one query of each sequence, over the same keys and values as ours.

Before: `attention.py` has a step. After: it checks and times what is returned here. Always: a peer gets keys and values in the
layout that it takes, copied once for each layer and outside of the time; only the gather of `gathered` is part of its work.
What this torch does not have is None.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from .attention import Step

Attend = Callable[["Tensor", "Tensor"], "Tensor"]
"""k_cache and v_cache of one layer to [S, Hq, D]."""

PAGE = 128
"""Positions of a page of flex_attention, whose tiles may not be larger than its pages."""


def gathered(step: Step) -> Attend:
    """The obvious way: every sequence's blocks side by side, then torch's fused attention. All lengths are equal here."""
    return lambda k_cache, v_cache: _fused(step, *_side_by_side(step, k_cache, v_cache))


def dense(step: Step) -> Attend:
    """torch's fused attention over keys and values that lie side by side already: a ceiling, since no memory is paged."""
    copies = _Copies(partial(_side_by_side, step))
    return lambda k_cache, v_cache: _fused(step, *copies.of(k_cache, v_cache))


def varlen(step: Step) -> Attend | None:
    """torch's paged attention of varying lengths, where it takes block tables; not in float32."""
    import torch

    try:
        varlen_attn: Any = import_module("torch.nn.attention.varlen").varlen_attn
    except (ImportError, AttributeError):
        return None
    if "block_table" not in inspect.signature(varlen_attn).parameters or step.q.dtype == torch.float32:
        return None
    tables, starts, lens = step.batch.integers()
    copies = _Copies(lambda *caches: [cache.transpose(1, 2).contiguous() for cache in caches])

    def attend(k_cache: Tensor, v_cache: Tensor) -> Tensor:
        found = varlen_attn(
            step.q, *copies.of(k_cache, v_cache), starts, None, 1, step.context,
            enable_gqa=True, seqused_k=lens, block_table=tables, scale=step.q.shape[2] ** -0.5,
        )  # fmt: skip
        return found if isinstance(found, torch.Tensor) else found[0]

    return attend


def flex(step: Step) -> Attend | None:
    """flex_attention over paged keys and values, compiled on a GPU."""
    import torch

    try:
        from torch.nn.attention.flex_attention import flex_attention

        pages = FlexPages(len(step.q), step.context, step.q.device)
    except ImportError:
        return None
    copies = _Copies(lambda *caches: [pages.fill(rows) for rows in _side_by_side(step, *caches)])
    run = torch.compile(flex_attention, dynamic=False) if step.q.is_cuda else _uncompiled(flex_attention)

    def attend(k_cache: Tensor, v_cache: Tensor) -> Tensor:
        keys, values = copies.of(k_cache, v_cache)
        scale = step.q.shape[2] ** -0.5
        found: Tensor = run(step.q.unsqueeze(2), keys, values, block_mask=pages.mask, scale=scale, enable_gqa=True)
        return found.squeeze(2)

    return attend


class FlexPages:
    """Pages for equally long sequences, in random order, as `torch.nn.attention.experimental` has them.

    Raises `ImportError` where this torch has it no more.
    """

    def __init__(self, num_seqs: int, context: int, device: torch.device) -> None:
        import torch
        from torch.nn.attention.experimental._paged_attention import PagedAttention
        from torch.nn.attention.flex_attention import BlockMask, noop_mask

        whole, left = divmod(context, PAGE)
        each = whole + (left > 0)
        self.table: Tensor = torch.randperm(num_seqs * each, device=device).view(num_seqs, each)
        """[S, pages of a sequence] where each page lies."""
        paged = PagedAttention(self.table.numel(), PAGE, num_seqs, device=str(device))
        paged.page_table[:, :each] = self.table
        paged.physical_to_logical.scatter_(1, self.table, torch.arange(each, device=device).expand(num_seqs, -1))
        paged.capacity[:] = each * PAGE

        def of_each(numbers: Tensor) -> Tensor:
            return numbers.to(device=device, dtype=torch.int32).expand(num_seqs, 1, 1, *numbers.shape)

        # Whole pages are seen without a question to the mask; the last one is asked if only a part of it is there.
        logical = BlockMask.from_kv_blocks(
            of_each(torch.tensor(int(left > 0))).contiguous(),
            of_each(torch.tensor([whole if left else 0] + [0] * (each - 1))).contiguous(),
            of_each(torch.tensor(whole)).contiguous(),
            of_each(torch.arange(each)).contiguous(),
            BLOCK_SIZE=(PAGE, PAGE),
            mask_mod=noop_mask,
            seq_lengths=(1, each * PAGE),
        )
        lens = torch.full((num_seqs,), context, device=device)
        self.mask: Any = paged.convert_logical_block_mask(logical, kv_len=lens)
        """The block mask over all pages."""

    def fill(self, rows: Tensor) -> Tensor:
        """[S, Hkv, L, D] side by side as pages [1, Hkv, all pages * PAGE, D]."""
        import torch

        num_seqs, heads, context, width = rows.shape
        each = self.table.shape[1]
        rows = torch.nn.functional.pad(rows, (0, 0, 0, each * PAGE - context)).view(num_seqs, heads, each, PAGE, width)
        pages = rows.new_empty(heads, self.table.numel(), PAGE, width)
        pages[:, self.table.flatten()] = rows.transpose(0, 1).flatten(1, 2)
        return pages.view(1, heads, -1, width)


class _Copies:
    """A layer's keys and values in another layout, made when it is first met."""

    def __init__(self, make: Callable[..., Any]) -> None:
        self._make = make
        self._made: dict[int, Any] = {}

    def of(self, k_cache: Tensor, v_cache: Tensor) -> Any:
        key = k_cache.data_ptr()
        if key not in self._made:
            self._made[key] = self._make(k_cache, v_cache)
        return self._made[key]


def _side_by_side(step: Step, *caches: Tensor) -> list[Tensor]:
    """Each cache as [S, Hkv, L, D]."""
    index = step.batch.block_tables.long()
    rows = (cache[index] for cache in caches)  # [S, blocks, Hkv, B, D]
    return [one.transpose(1, 2).flatten(2, 3)[:, :, : step.context] for one in rows]


def _fused(step: Step, keys: Tensor, values: Tensor) -> Tensor:
    from torch.nn.functional import scaled_dot_product_attention

    return scaled_dot_product_attention(step.q.unsqueeze(2), keys, values, enable_gqa=True).squeeze(2)


def _uncompiled(flex_attention: Callable[..., Any]) -> Callable[..., Any]:
    """On a CPU, where it is checked and not measured: some releases warn of what is not compiled."""

    def run(*arguments: Any, **options: Any) -> Any:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return flex_attention(*arguments, **options)

    return run
