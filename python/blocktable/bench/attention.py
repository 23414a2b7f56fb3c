"""Times one step's decode attention over a full pool: microseconds a layer and how much of the memory's speed that is.

Before: `blocktable bench attention`. After: one row per backend and kind of heads. The layers of one pool take turns until
every row of keys and values has been read, so that no cache holds them; each answer is compared with the reference first.
"""

import argparse
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from statistics import median
from time import perf_counter
from typing import TYPE_CHECKING, Any

from ..errors import MissingExtraError
from .command import count
from .row import Row, check

if TYPE_CHECKING:
    from torch import Tensor

SUMMARY = """Attend one query of each sequence over paged keys and values, on the CPU. Needs the extra `engine`.

Backends: cpu (SIMD, in place), reference (plain torch), sdpa (torch's fused attention over keys and values gathered in the same
step, the gather included). fraction_of_read is the speed at which keys and values are read, over that of a plain sum over
512 MiB with as many threads, measured in turn in the same run."""

TABLE = ("backend", "dtype", "batch", "context", "heads", "threads", "us", "gb_per_s", "read_gb_per_s", "fraction_of_read")

BACKENDS = ("cpu", "reference", "sdpa")
HEADS = {"9/3x64": (9, 3, 64), "32/8x128": (32, 8, 128)}
"""Query heads / KV heads x width: SmolLM2-135M's, and the commonest of larger models."""
BLOCK_SIZE = 16
ROTATED_BYTES = 512 * 2**20
"""Layers take turns over at least so many bytes of keys and values."""
READ_BYTES = 512 * 2**20
TOLERANCE = {"float32": 1e-5, "bfloat16": 1e-2, "float16": 1e-3}


def add_options(parser: argparse.ArgumentParser) -> None:
    """How much, and on what."""
    parser.add_argument("--backend", nargs="+", choices=BACKENDS, default=list(BACKENDS), help="(all of them)")
    parser.add_argument("--heads", nargs="+", choices=list(HEADS), default=list(HEADS), help="query/KV heads x width (both)")
    parser.add_argument(
        "--dtype", default="float32", choices=sorted(TOLERANCE), help="float32 (the default), bfloat16, float16"
    )
    parser.add_argument("--batch", type=count, default=32, help="sequences (32)")
    parser.add_argument("--context", type=count, default=2048, help="positions of each (2048)")
    parser.add_argument("--rounds", type=count, default=5, help="turns through all layers, of which the median counts (5)")
    parser.add_argument("--threads", type=count, help="CPU threads (as torch chooses)")


def rows(options: argparse.Namespace) -> Iterator[Row]:
    """One row per backend and kind of heads."""
    try:
        import torch
    except ImportError as error:
        raise MissingExtraError("blocktable bench attention", "engine", error.name or "torch") from None
    rotated, read_bytes = ROTATED_BYTES, READ_BYTES
    if options.smoke:
        options.batch, options.context, options.rounds, rotated, read_bytes = 2, 40, 1, 0, 2**20
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    plain = torch.ones(read_bytes // 4)
    for heads in options.heads:
        step = _make_step(options, heads, rotated)
        for backend in options.backend:
            attend = _attention(backend, step)
            _check_answer(attend, step, options.dtype)
            yield {"bench": "attention", **_figures(options, backend, heads, attend, step, plain)}


@dataclass(frozen=True)
class Step:
    """One query of each sequence, and the caches that it attends to."""

    q: "Tensor"  # [S, Hq, D]
    layers: "list[tuple[Tensor, Tensor]]"
    batch: Any
    context: int

    @property
    def bytes_read(self) -> int:
        """Of keys and values, a layer."""
        k_cache = self.layers[0][0]
        return 2 * len(self.q) * self.context * k_cache.shape[1] * k_cache.shape[3] * k_cache.element_size()


Attend = Callable[["Tensor", "Tensor"], "Tensor"]


def _make_step(options: argparse.Namespace, heads: str, rotated: int) -> Step:
    import torch

    from ..kernels import AttentionBatch
    from ..model.geometry import KVGeometry, LayerShape
    from ..model.kv_memory import KVMemory
    from ..model.kv_sizing import KVSizing

    query_heads, kv_heads, width = HEADS[heads]
    dtype = getattr(torch, options.dtype)
    blocks_each = -(-options.context // BLOCK_SIZE)
    layer_bytes = 2 * options.batch * options.context * kv_heads * width * dtype.itemsize
    geometry = KVGeometry((LayerShape(kv_heads, width, width),) * max(2, -(-rotated // layer_bytes)), dtype)
    num_blocks = 1 + options.batch * blocks_each
    sizing = KVSizing(
        num_blocks=num_blocks,
        block_size=BLOCK_SIZE,
        bytes_per_block=geometry.bytes_per_block(BLOCK_SIZE),
        chosen_by="num_blocks",
        available_bytes=None,
    )
    memory = KVMemory(geometry, sizing, torch.device("cpu"))
    for block in memory.buffer:
        block.copy_(torch.randn(block.shape))
    tables = 1 + torch.randperm(num_blocks - 1, dtype=torch.int32).view(options.batch, blocks_each)
    lens = torch.full((options.batch,), options.context)
    batch = AttentionBatch.build(tables, torch.arange(options.batch + 1), lens, BLOCK_SIZE)
    q = torch.randn(options.batch, query_heads, width).to(dtype)
    return Step(q, list(memory.layers), batch, options.context)


def _attention(backend: str, step: Step) -> Attend:
    from ..model.attention_backend import CPU, REFERENCE

    if backend == "sdpa":
        return partial(_gather_and_attend, step)
    kernel = {"cpu": CPU, "reference": REFERENCE}[backend].paged_attention
    scale = step.q.shape[2] ** -0.5
    return lambda k_cache, v_cache: kernel(step.q, k_cache, v_cache, step.batch, scale=scale)


def _gather_and_attend(step: Step, k_cache: "Tensor", v_cache: "Tensor") -> "Tensor":
    """The obvious way: every sequence's blocks side by side, then torch's fused attention. All lengths are equal here."""
    from torch.nn.functional import scaled_dot_product_attention

    gathered: list[Tensor] = []
    for cache in (k_cache, v_cache):
        rows = cache[step.batch.block_tables.long()]  # [S, blocks, Hkv, B, D]
        gathered.append(rows.transpose(1, 2).flatten(2, 3)[:, :, : step.context])
    keys, values = gathered
    return scaled_dot_product_attention(step.q.unsqueeze(2), keys, values, enable_gqa=True).squeeze(2)


def _check_answer(attend: Attend, step: Step, dtype: str) -> None:
    import torch

    k_cache, v_cache = step.layers[-1]
    with torch.inference_mode():
        found, expected = attend(k_cache, v_cache).float(), _attention("reference", step)(k_cache, v_cache).float()
    worst = float((found - expected).abs().max())
    check(holds=worst <= TOLERANCE[dtype], what=f"it differs from the reference by {worst:.1e}")


def _figures(options: argparse.Namespace, backend: str, heads: str, attend: Attend, step: Step, plain: "Tensor") -> Row:
    import torch
    from torch.utils.dlpack import to_dlpack  # type: ignore[attr-defined]

    from .. import _core

    threads = torch.get_num_threads()
    took, read = [], []
    with torch.inference_mode():
        for _ in range(options.rounds):
            start = perf_counter()
            _core.cpu_read_sum(to_dlpack(plain), threads=threads)
            read.append(perf_counter() - start)
            start = perf_counter()
            for k_cache, v_cache in step.layers:
                attend(k_cache, v_cache)
            took.append((perf_counter() - start) / len(step.layers))
    speed, read_speed = step.bytes_read / median(took), plain.nbytes / median(read)
    return {
        "backend": backend,
        "dtype": options.dtype,
        "batch": options.batch,
        "context": options.context,
        "heads": heads,
        "threads": threads,
        "us": round(1e6 * median(took), 1),
        "gb_per_s": round(speed / 1e9, 2),
        "read_gb_per_s": round(read_speed / 1e9, 2),
        "fraction_of_copy": None,
        "fraction_of_read": round(speed / read_speed, 3),
    }
