"""The kernels of GPUs: the Triton kernels, and which of them a layer's attention runs on.

Before: a layer's new queries, keys and values on a GPU. After: the output projection. Always: mixtures and prompts go to the
one kernel for all, single queries to the one that cuts contexts into parts, and those that share enough to the cascade. Not yet
run on a GPU: the bounds below are derived, not measured.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ..kernels import triton_attention, triton_cascade, triton_decode, triton_store
from ..kernels.attention_batch import AttentionBatch

SHARED_POSITIONS = triton_decode.PART
"""Shorter prefixes are not looked for: reading one of less than a part's positions again costs less than a launch."""

CASCADE_BYTES = 32 << 20
"""A cascade is one launch more in every layer. Reading so much less pays for about 7 us, at the 4.3 TB/s that an H200 copies
at; published cascades lose below that."""


class GpuKernels:
    """The two kernels with the signatures of `kernels/reference.py`, and the memory that they keep between launches."""

    def __init__(self) -> None:
        self._scratch = triton_decode.DecodeScratch()

    def store_kv(self, k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor) -> None:
        """As `reference.store_kv`."""
        triton_store.store_kv(k, v, k_cache, v_cache, slots)

    def paged_attention(self, q: Tensor, k_cache: Tensor, v_cache: Tensor, batch: AttentionBatch, **options: Any) -> Tensor:
        """As `reference.paged_attention`."""
        if batch.has_chunks:
            return triton_attention.paged_attention(q, k_cache, v_cache, batch, **options)
        if cascade_pays(k_cache, v_cache, batch) and not options.get("window"):
            options.pop("window", None)
            return triton_cascade.cascade_decode(q, k_cache, v_cache, batch, scratch=self._scratch, **options)
        return triton_decode.paged_decode(q, k_cache, v_cache, batch, scratch=self._scratch, **options)


def cascade_pays(k_cache: Tensor, v_cache: Tensor, batch: AttentionBatch) -> bool:
    """Whether attending shared prefixes once reads at least `CASCADE_BYTES` less in a layer."""
    if batch.prefixes is None:
        return False
    heads = k_cache.shape[1]
    position_bytes = heads * (k_cache.shape[3] * k_cache.element_size() + v_cache.shape[3] * v_cache.element_size())
    return batch.prefixes.saved_positions * position_bytes >= CASCADE_BYTES
