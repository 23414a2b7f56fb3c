"""Arrays of one step, side by side in memory that a device copies by itself: one copy brings them all.

Before: the runner has a plan's arrays. After: the same numbers on the device, at the same place in every step, so that a
captured graph may read them. Always: nothing here waits for what the device was told to do, but for the last copy out of this
very memory, which is over long before the next step is made.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import DTypeLike, NDArray
from torch import Tensor

ALIGNMENT = 16
"""Bytes that each array begins at a multiple of."""

Kind = tuple[tuple[int, ...], DTypeLike]
"""Shape and dtype of an array."""


class Parcel:
    """Arrays of these kinds: `host` to be filled, `device` to be read after `send`."""

    def __init__(self, kinds: Sequence[Kind], device: torch.device) -> None:
        starts, end = [], 0
        for shape, dtype in kinds:
            starts.append(end)
            end += -(-math.prod(shape) * np.dtype(dtype).itemsize // ALIGNMENT) * ALIGNMENT
        # Not inference tensors, so that they may be written inside and outside of inference mode.
        with torch.inference_mode(mode=False):
            self._from = torch.zeros(end, dtype=torch.uint8, pin_memory=device.type == "cuda")
            self._to = torch.zeros(end, dtype=torch.uint8, device=device)
        self._sent: torch.cuda.Event | None = None
        memory = self._from.numpy()
        self.host: list[NDArray[Any]] = []
        self.device: list[Tensor] = []
        for start, (shape, dtype) in zip(starts, kinds, strict=True):
            size = math.prod(shape) * np.dtype(dtype).itemsize
            array = memory[start : start + size].view(dtype)
            self.host.append(array.reshape(shape))
            self.device.append(self._to[start : start + size].view(torch.from_numpy(array).dtype).view(shape))

    def open(self) -> list[NDArray[Any]]:
        """`host`, which may be written now: what was sent before is on the device."""
        if self._sent is not None:
            self._sent.synchronize()
        return self.host

    def send(self) -> list[Tensor]:
        """Have all that `host` holds copied, and return `device`; what is launched after it reads it."""
        self._to.copy_(self._from, non_blocking=True)
        if self._to.is_cuda:
            if self._sent is None:
                self._sent = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._sent.record()
        return self.device


def packed(arrays: Sequence[NDArray[Any]], device: torch.device) -> list[Tensor]:
    """These arrays on `device`; on the CPU themselves, which then must not be written again."""
    if device.type == "cpu":
        return [torch.from_numpy(array) for array in arrays]
    parcel = Parcel([(array.shape, array.dtype) for array in arrays], device)
    for place, array in zip(parcel.open(), arrays, strict=True):
        place[...] = array
    return parcel.send()
