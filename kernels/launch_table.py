"""How each Triton kernel is launched: tile sizes, warps and stages by target, dtype and class of head size.

Before: a launcher knows where its tensors are. After: it launches with these constants. Always: nothing is tuned or asked of a
device when this is imported; what is not in the table is refused, so no variant is compiled that no test has compiled; window,
block size, soft cap's value, grouping and head size are run-time values and make no variants.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .shapes import KernelInputError

HEAD_CLASSES = (32, 64, 128, 256)
"""A head size belongs to the smallest class that holds it."""

TARGETS = ("sm_80", "sm_90", "sm_100", "gfx942", "interpreter")


@dataclass(frozen=True, slots=True)
class Launch:
    """Constants of one variant of an attention kernel."""

    rows: int  # of the query tile
    tile: int  # positions of a step of the loop
    warps: int
    stages: int

    def constants(self, rows: int, head_class: int) -> dict[str, Any]:
        """As a kernel takes them, with a query tile of `rows` rows."""
        return {
            "ROWS": rows,
            "TILE": self.tile,
            "KEYS": head_class,
            "VALUES": head_class,
            "STAGES": self.stages,
            "num_warps": self.warps,
            "num_stages": self.stages,
        }


# Where the rows come from: starting points whose ahead-of-time builds have no spills and the loads, products and buffers that
# tests/kernels/test_triton_compiled.py asks for. None was timed on a GPU.
_HALF = {
    # head class: (prefill, decode)
    32: (Launch(64, 64, 4, 3), Launch(16, 64, 4, 3)),
    64: (Launch(64, 64, 4, 3), Launch(16, 64, 4, 3)),
    128: (Launch(64, 64, 4, 3), Launch(16, 64, 4, 3)),
    256: (Launch(64, 32, 8, 3), Launch(16, 32, 4, 3)),
}
# Where a target cannot hold these: the larger tile spills registers on sm_80, and needs more than gfx942's 64 KiB.
_HALF_OF = {
    "sm_80": {
        128: (Launch(64, 32, 4, 3), Launch(16, 64, 4, 3)),
        256: (Launch(32, 32, 8, 2), Launch(16, 32, 4, 3)),
    },
    "gfx942": {
        128: (Launch(64, 32, 4, 2), Launch(16, 32, 4, 2)),
        256: (Launch(32, 16, 8, 2), Launch(16, 16, 4, 2)),
    },
}
_FULL = {
    32: (Launch(32, 32, 4, 2), Launch(16, 32, 4, 2)),
    64: (Launch(32, 32, 4, 2), Launch(16, 32, 4, 2)),
    128: (Launch(32, 32, 4, 2), Launch(16, 32, 4, 2)),
    256: (Launch(16, 16, 4, 2), Launch(16, 16, 4, 2)),
}
_SMALL = {size: (Launch(16, 16, 1, 1), Launch(16, 16, 1, 1)) for size in HEAD_CLASSES}


def attention_launch(target: str, dtype: torch.dtype, head_size: int, *, is_decode: bool) -> tuple[int, Launch]:
    """The head class and the constants. Raises `KernelInputError` for what the table does not hold."""
    head_class = next((size for size in HEAD_CLASSES if head_size <= size), None)
    if head_class is None:
        raise KernelInputError(f"q has Dk={head_size}: must be at most {HEAD_CLASSES[-1]} for these kernels")
    if target not in TARGETS:
        raise KernelInputError(f"target {target} is not in the launch table: must be one of {', '.join(TARGETS)}")
    if dtype not in (torch.float32, torch.float16, torch.bfloat16):
        raise KernelInputError(f"q has dtype {dtype}: must be float32, float16 or bfloat16 for these kernels")
    if target == "interpreter":
        rows = _SMALL
    elif dtype == torch.float32:
        rows = _FULL
    else:
        rows = _HALF | _HALF_OF.get(target, {})
    return head_class, rows[head_class][int(is_decode)]


def target_of(tensor: Tensor) -> str:
    """The table's name of the device that `tensor` is on; a CPU is Triton's interpreter."""
    if tensor.device.type == "cpu":
        return "interpreter"
    if tensor.device.type != "cuda":
        raise KernelInputError(f"the tensors are on {tensor.device}: must be on a GPU of CUDA or ROCm")
    if torch.version.hip:
        return str(torch.cuda.get_device_properties(tensor.device).gcnArchName).partition(":")[0]
    major, _ = torch.cuda.get_device_capability(tensor.device)
    return f"sm_{major}0"
