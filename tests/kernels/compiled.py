"""Compiles the Triton kernels for GPUs that are not there, and reads what came out: `python -m tests.kernels.compiled`.

Before: `test_triton_compiled.py` starts it in a process of its own, where Triton does not interpret. After: a line of JSON for
each variant. Always: a kernel is compiled with the very arguments and constants that its launcher would launch it with, through
a driver that knows only its target.
"""

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget

from blocktable.kernels import (
    AttentionBatch,
    triton_attention,
    triton_blocks,
    triton_cascade,
    triton_decode,
    triton_rope,
    triton_store,
)

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}
VARIANTS = [
    ("decode", "bfloat16", 128),
    ("prefill", "bfloat16", 128),
    ("split", "bfloat16", 128),
    ("cascade", "bfloat16", 128),
    ("rest", "bfloat16", 128),
    ("decode-fp8", "bfloat16", 128),
    ("split-fp8", "bfloat16", 128),
    ("store", "bfloat16", 128),
    ("store-int8", "bfloat16", 128),
    ("rope", "bfloat16", 128),
    ("rope-int8", "bfloat16", 128),
    ("copy", "bfloat16", 128),
]
MORE = [
    ("decode", "float16", 64),
    ("decode-int8", "bfloat16", 128),
    *(("split-int8", "bfloat16", width) for width in (64, 128)),
    ("split-fp8", "bfloat16", 64),
    *(("decode", dtype, width) for dtype in ("bfloat16", "float32") for width in (32, 64, 80, 96, 256)),
    *(("split", dtype, width) for dtype in ("bfloat16", "float32") for width in (64, 256)),
    ("split", "float32", 128),
    *(("cascade", "bfloat16", width) for width in (64, 256)),
    ("cascade", "float32", 128),
    *(("prefill", dtype, width) for dtype in ("float16", "float32") for width in (32, 64, 80, 96, 128, 256)),
]


class Driver:
    """As much of a driver as compiling needs."""

    def __init__(self, name: str) -> None:
        self.name = name

    def get_current_target(self) -> GPUTarget:
        """The GPU to compile for."""
        return TARGETS[self.name]

    def get_current_device(self) -> int:
        """One number for each target: what has been compiled is remembered by it."""
        return list(TARGETS).index(self.name)

    def get_current_stream(self, _device: int = 0) -> int:
        """Never used: nothing is launched."""
        return 0


def compile_variant(target: str, kind: str, dtype: str, width: int) -> dict[str, Any]:
    """What the compiler made of one variant."""
    triton.runtime.driver.set_active(Driver(target))
    made: list[Any] = []

    def launch(kernel: Any, grid: Any, arguments: Any, constants: Any) -> None:
        made.append(kernel.warmup(*arguments, grid=grid, **constants))

    _call(kind, getattr(torch, dtype), width, target, launch)
    # A cascade is two launches: the shared prefixes, and each sequence's rest.
    number = 1 if kind == "rest" else 0
    return _about(target, kind, dtype, width) | _read(made[number], target)


def _about(target: str, kind: str, dtype: str, width: int) -> dict[str, Any]:
    return {"triton": triton.__version__, "target": target, "kind": kind, "dtype": dtype, "width": width}


def _call(kind: str, dtype: torch.dtype, width: int, target: str, launch: Any) -> None:
    """Call the launcher as a model of 8 KV heads with 4 query heads each would."""
    kind, _, quantised = kind.partition("-")
    stored = {"": dtype, "int8": torch.int8, "fp8": torch.float8_e4m3fn}[quantised]
    pool = torch.zeros(9, 4 * 8 * 16 * 2 * width).to(stored)  # four layers a block
    half = 8 * 16 * width
    caches = [pool[:, at : at + half].view(9, 8, 16, width) for at in (0, half)]
    scales = {name: torch.ones(9, 8, 16) for name in ("k_scales", "v_scales")} if quantised else {}
    if kind == "copy":
        triton_blocks.copy_blocks(pool, torch.tensor([[1, 2]], dtype=torch.int32), launch=launch)
    elif kind == "store":
        rows = torch.zeros(3, 8, width, dtype=dtype)
        store = triton_store.store_kv_quantised if quantised else triton_store.store_kv
        store(rows, rows, *caches, *scales.values(), torch.tensor([17, 18, 19]), launch=launch)
    elif kind == "rope":
        q, rows, angles = torch.zeros(3, 32, width, dtype=dtype), torch.zeros(3, 8, width, dtype=dtype), torch.zeros(3, width)
        slots = torch.tensor([17, 18, 19])
        triton_rope.rope_store_kv(q, rows, rows, angles, angles, *caches, slots, **scales, launch=launch)
    else:
        queries = 40 if kind == "prefill" else 1
        batch = AttentionBatch.build(
            torch.ones(2, 8, dtype=torch.int32), torch.tensor([0, queries, 2 * queries]), torch.tensor([100, 90]), 16
        )
        q = torch.zeros(2 * queries, 32, width, dtype=dtype)
        if kind in ("cascade", "rest"):
            batch = batch.with_prefixes([0, 1], [0, 2], [5])
        attend = _LAUNCHERS.get(kind, triton_attention.paged_attention)
        attend(q, *caches, batch, scale=0.1, target=target, launch=launch, **scales)


_LAUNCHERS: dict[str, Any] = {
    "split": triton_decode.paged_decode,
    "cascade": triton_cascade.cascade_decode,
    "rest": triton_cascade.cascade_decode,
}


def _read(compiled: Any, target: str) -> dict[str, Any]:
    """Registers, spills, shared memory, loads, products and buffers."""
    found: dict[str, Any] = {"shared": compiled.metadata.shared}
    if target.startswith("gfx"):
        text = compiled.asm["amdgcn"]
        for name in ("vgpr_count", "vgpr_spill_count"):
            number = re.search(rf"\.{name}:\s+(\d+)", text)
            found[name] = int(number.group(1)) if number else None
        found["loads_16_bytes"] = len(re.findall(r"\b(?:global|buffer)_load_dwordx4", text))
        found["products"] = sorted(set(re.findall(r"\bv_mfma_f32_\w+?_(bf16|f16|f32)", text)))
        return found
    arch = TARGETS[target].arch
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as ptx:
        ptx.write(compiled.asm["ptx"])
        ptx.flush()
        from triton.backends.nvidia.compiler import get_ptxas

        name = f"sm_{arch}{'a' if arch >= 90 else ''}"
        command = [get_ptxas(arch).path, "-v", f"--gpu-name={name}", ptx.name, "-o", "/dev/null"]
        told = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    found["atomics"] = sorted(set(re.findall(r"\batom\.[\w.:]+", compiled.asm["ptx"])))
    found["registers"] = max(int(number) for number in re.findall(r"Used (\d+) registers", told))
    found["spills"] = sum(int(number) for number in re.findall(r"(\d+) bytes spill stores", told))
    sass = _sass(compiled)
    found["loads_16_bytes"] = len(re.findall(r"\b(?:LDGSTS|LDG)\.[\w.]*128", sass))
    found["loads_2_bytes"] = len(re.findall(r"\bLDG\.[\w.]*U?16\b", sass))
    found["products"] = sorted(set(re.findall(r"\b(HMMA|HGMMA|UTCHMMA|QGMMA|DMMA)\b", sass)))
    # K and V wait in shared memory as [buffers, rows, width].
    buffers = re.findall(r"ttg\.local_alloc\s*: \(\) -> !ttg\.memdesc<(\d+)x\d+x\d+x", compiled.asm["ttgir"])
    found["buffers"] = sorted(int(number) for number in buffers)
    return found


def _sass(compiled: Any) -> str:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as cubin:
        cubin.write(compiled.asm["cubin"])
        cubin.flush()
        command = [triton.knobs.nvidia.nvdisasm.path, "-c", cubin.name]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def _wanted(kind: str, target: str, *, everything: bool) -> bool:
    """The newest of each maker compiles all variants; the others those that differ most."""
    return everything or target in ("sm_90", "gfx942") or kind in ("decode", "prefill", "split", "cascade", "decode-fp8")


def rows(*, everything: bool) -> Iterator[dict[str, Any]]:
    """A row for each variant and target; what a target cannot hold is a row with `refused`."""
    for kind, dtype, width in VARIANTS + (MORE if everything else []):
        for target in TARGETS:
            if not _wanted(kind, target, everything=everything):
                continue
            try:
                yield compile_variant(target, kind, dtype, width)
            except (ValueError, RuntimeError, triton.CompilationError) as error:
                yield _about(target, kind, dtype, width) | {"refused": f"{type(error).__name__}: {str(error)[-300:]}"}


STEPS = [([1], [1]), ([1], [16]), ([1, 1], [17, 300]), ([1] * 16, [160] * 16), ([1] * 33, [513] * 33), ([1] * 3, [4096] * 3)]
"""Queries and lengths of steps that follow each other."""


def variants(kind: str) -> dict[str, Any]:
    """How many variants of one kernel a serving makes, whose steps differ in all that may differ from step to step."""
    triton.runtime.driver.set_active(Driver("sm_90"))
    made = set()

    def launch(kernel: Any, grid: Any, arguments: Any, constants: Any) -> None:
        made.add((kernel.__name__, kernel.warmup(*arguments, grid=grid, **constants).hash))

    pool = torch.zeros(9, 2 * 8 * 16 * 128, dtype=torch.bfloat16)
    caches = [pool[:, at : at + 8 * 16 * 128].view(9, 8, 16, 128) for at in (0, 8 * 16 * 128)]
    for counts, lens in STEPS:
        counts = [3 * count for count in counts] if kind == "prefill" else counts
        lens = [max(seq_len, 40) for seq_len in lens] if kind in ("prefill", "cascade") else lens
        tables = torch.ones(len(lens), -(-max(lens) // 16), dtype=torch.int32)
        batch = AttentionBatch.build(tables, torch.tensor([0, *counts]).cumsum(0), torch.tensor(lens), 16)
        if kind == "cascade" and len(lens) > 1:
            batch = batch.with_prefixes(range(len(lens)), [0, len(lens)], [min(lens) // 17])
        q = torch.zeros(sum(counts), 32, 128, dtype=torch.bfloat16)
        attend = _LAUNCHERS.get(kind, triton_attention.paged_attention)
        attend(q, *caches, batch, scale=0.1, target="sm_90", launch=launch)
        rows = torch.zeros(sum(counts), 8, 128, dtype=torch.bfloat16)
        triton_store.store_kv(rows, rows, *caches, torch.arange(sum(counts)) + 16, launch=launch)
    return {"variants_of": kind, "made": sorted(name for name, _ in made)}


if __name__ == "__main__":
    if "--variants" in sys.argv:
        for kind in ("prefill", "split", "cascade"):
            print(json.dumps(variants(kind)), flush=True)
    else:
        for row in rows(everything="--all" in sys.argv):
            print(json.dumps(row), flush=True)
