"""Memory that gathered rows are copied into, kept from call to call.

Before: a step makes its batch, with the scratch of the engine. After: `reference` gathers into it, layer by layer. Always:
holds at most one buffer of `KEPT_ELEMENTS` for each name and dtype; what is taken is overwritten by the next take of the
same name. Not for two threads at once.

Why: a fresh buffer of some megabytes comes from the system page by page, which took longer than the attention itself: 32
decodes x 160 positions on two threads 4.6 ms a layer with fresh buffers, 1.3 ms with kept ones, measured in turn.
"""

from __future__ import annotations

import torch
from torch import Tensor

# Elements of a buffer that is kept; larger ones, of single long sequences, are allocated and given back.
KEPT_ELEMENTS = 4 << 20


class Scratch:
    """Buffers by name. `take` gives the same memory again for the same name."""

    def __init__(self) -> None:
        self._buffers: dict[tuple[str, torch.dtype, torch.device], Tensor] = {}

    def take(self, name: str, rows: int, width: int, like: Tensor) -> Tensor:
        """An uninitialised [rows, width] of `like`'s dtype and device."""
        elements = rows * width
        if elements > KEPT_ELEMENTS:
            return like.new_empty(rows, width)
        key = (name, like.dtype, like.device)
        buffer = self._buffers.get(key)
        if buffer is None or buffer.numel() < elements:
            # Not an inference tensor, so that it may be written inside and outside of inference mode.
            with torch.inference_mode(mode=False):
                buffer = torch.empty(elements, dtype=like.dtype, device=like.device)
            self._buffers[key] = buffer
        return buffer[:elements].view(rows, width)
