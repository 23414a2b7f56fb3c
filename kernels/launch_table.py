"""How each attention kernel is launched: tile sizes, warps and stages by target, dtype and class of head size.

Before: a launcher knows where its tensors are. After: it launches with these constants. Always: nothing is tuned or asked of a
device when this is imported; what is not in the table is refused; window, block size, soft cap's value, grouping and head size
are run-time values and make no variants. Whether there are soft caps, sinks, slopes or scales makes some, of which tests
compile single queries with scales.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .shapes import KernelInputError

HEAD_CLASSES = (32, 64, 128, 256)
"""A head size belongs to the smallest class that holds it."""
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
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


class Entry(NamedTuple):
    """One key's launches, and where they come from. None was timed on a GPU."""

    prefill: Launch
    decode: Launch
    source: str


COMPILED = "starting point; builds without spills, with the loads, products and buffers that the gates ask for"
SPILLS = "the tile, the warps or the stages of the other targets spill registers in the ahead-of-time build"
SHARED = "the tile of the other targets needs more than 64 KiB of shared memory"
EXACT = "products of float32 are exact and rows twice as wide: smaller tiles, two stages"
SMALLEST = "the smallest that the language allows: the interpreter's cost is the number of operations"

_HALF = {
    32: Entry(Launch(64, 64, 4, 3), Launch(16, 64, 4, 3), COMPILED),
    64: Entry(Launch(64, 64, 4, 3), Launch(16, 64, 4, 3), COMPILED),
    128: Entry(Launch(64, 64, 4, 3), Launch(16, 64, 4, 3), COMPILED),
    256: Entry(Launch(64, 32, 8, 3), Launch(16, 32, 8, 3), COMPILED),
}
_HALF_OF = {
    ("sm_80", 128): Entry(Launch(64, 32, 8, 3), Launch(16, 64, 4, 3), SPILLS),
    ("sm_80", 256): Entry(Launch(32, 32, 8, 2), Launch(16, 32, 8, 3), SPILLS),
    ("gfx942", 128): Entry(Launch(64, 32, 4, 2), Launch(16, 32, 4, 2), SHARED),
    ("gfx942", 256): Entry(Launch(32, 16, 8, 2), Launch(16, 16, 4, 2), SHARED),
}
_FULL = {
    32: Entry(Launch(32, 32, 4, 2), Launch(16, 32, 4, 2), EXACT),
    64: Entry(Launch(32, 16, 8, 2), Launch(16, 16, 4, 2), EXACT),
    128: Entry(Launch(32, 16, 8, 2), Launch(16, 16, 4, 2), EXACT),
    256: Entry(Launch(16, 16, 4, 2), Launch(16, 16, 4, 2), EXACT),
}
_FULL_OF = {
    ("sm_80", 128): _FULL[128]._replace(prefill=Launch(32, 16, 8, 1), source=SPILLS),
    ("sm_80", 256): _FULL[256]._replace(decode=Launch(16, 16, 8, 1), source=SPILLS),
}


def _entry(target: str, dtype: torch.dtype, head_class: int) -> Entry:
    if target == "interpreter":
        return Entry(Launch(16, 16, 1, 1), Launch(16, 16, 1, 1), SMALLEST)
    if dtype == torch.float32:
        return _FULL_OF.get((target, head_class), _FULL[head_class])
    return _HALF_OF.get((target, head_class), _HALF[head_class])


TABLE = {key: _entry(*key) for key in product(TARGETS, DTYPES, HEAD_CLASSES)}
"""(target, dtype, class of head size) to the launches of chunks and of single queries."""


def attention_launch(target: str, dtype: torch.dtype, head_size: int, *, is_decode: bool) -> tuple[int, Launch]:
    """The head class and the constants. Raises `KernelInputError` for what the table does not hold."""
    head_class = next((size for size in HEAD_CLASSES if head_size <= size), None)
    if head_class is None:
        raise KernelInputError(f"q has Dk={head_size}: must be at most {HEAD_CLASSES[-1]} for these kernels")
    if target not in TARGETS:
        raise KernelInputError(f"target {target} is not in the launch table: must be one of {', '.join(TARGETS)}")
    entry = TABLE.get((target, dtype, head_class))
    if entry is None:
        raise KernelInputError(f"q has dtype {dtype}: must be {', '.join(map(str, DTYPES))} for these kernels")
    return head_class, entry.decode if is_decode else entry.prefill


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
