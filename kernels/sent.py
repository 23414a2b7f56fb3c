"""Numbers of the host, sent to a device without a wait for it.

Before: a batch has lists that kernels read. After: they do. Always: what is sent to a GPU comes from memory that its copy
engine reads by itself; a copy out of any other memory waits until the GPU has done all that it was told before.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def sent(numbers: Sequence[Any], device: torch.device) -> Tensor:
    """`numbers`, of one level or two, as int32 on `device`."""
    tensor = torch.tensor(numbers, dtype=torch.int32)
    if device.type == "cpu":
        return tensor
    return (tensor.pin_memory() if device.type == "cuda" else tensor).to(device, non_blocking=True)
