"""Paged attention over strided KV memory: the public names.

Before: `blocktable.model.attention_bridge` has a layer's queries, keys and values. After: its output. Every sibling of
this file is a link into the top-level `kernels/`, which imports nothing else of ours.
"""

from .attention_batch import AttentionBatch
from .reference import paged_attention, store_kv
from .scratch import Scratch
from .shapes import KernelInputError, ShapeError

__all__ = ["AttentionBatch", "KernelInputError", "Scratch", "ShapeError", "paged_attention", "store_kv"]
