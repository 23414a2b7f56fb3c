"""The kernels of GPUs: the Triton kernels, and which of them a layer's attention runs on.

Before: a layer's new queries, keys and values on a GPU. After: the output projection. Always: mixtures and prompts go to the
one kernel for all, single queries to the one that cuts contexts into parts, and those that are told what they share to the
cascade. Not yet run on a GPU: the bounds below are derived, not measured.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ..kernels import triton_attention, triton_cascade, triton_decode, triton_rope, triton_store
from ..kernels.attention_batch import AttentionBatch
from ..kernels.context_parts import PART
from .attention_backend import CascadeRule

CASCADE = CascadeRule(positions=PART, bytes=32 << 20, bytes_instead_of_graph=256 << 20)
"""A cascade is one launch more in every layer: 32 MiB less to read pay for about 7 us, at the 4.3 TB/s that an H200 copies at;
published cascades lose below that. Where the step would be a graph, three launches of each layer, of about 16 us each on the
host, must be paid for too."""


rope_store_kv = triton_rope.rope_store_kv
"""As `rope.rope_store_kv`."""


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
        if batch.prefixes is not None and not batch.outgrows(options.get("window", 0)):
            options.pop("window", None)
            return triton_cascade.cascade_decode(q, k_cache, v_cache, batch, scratch=self._scratch, **options)
        return triton_decode.paged_decode(q, k_cache, v_cache, batch, scratch=self._scratch, **options)
