"""Times one step's decode attention over a full pool: microseconds a layer and how much of the memory's speed that is.

Before: `blocktable bench attention`. After: one row per backend and kind of heads. The layers of one pool take turns until
every row of keys and values has been read, so that no cache holds them; each answer is compared with the reference first.
"""

import argparse
from collections.abc import Iterator
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING, Any

from ..errors import MissingExtraError
from . import torch_peers
from .command import count
from .device_clock import Clock, clock_of
from .row import Row, check
from .torch_peers import Attend

if TYPE_CHECKING:
    import torch
    from torch import Tensor

SUMMARY = """Attend one query of each sequence over paged keys and values. Needs the extra `engine`.

Backends: cpu (SIMD, in place), triton (the kernels of GPUs), reference (plain torch), sdpa (torch's fused attention over keys
and values gathered in the same step, the gather included), flex (torch's paged flex_attention, in pages of 128), varlen
(torch's other paged attention, where torch has it), dense (torch's fused attention over keys and values that lie side by side
already: a ceiling).
fraction_of_read is the speed at which keys and values are read, over that of a plain sum over 512 MiB with as many threads,
measured in turn in the same run; on a GPU fraction_of_copy, over that of a plain copy."""

TABLE = (
    "backend", "dtype", "batch", "context", "heads", "threads", "us", "gb_per_s",
    "read_gb_per_s", "copy_gb_per_s", "fraction_of_read", "fraction_of_copy",
)  # fmt: skip

BACKENDS = {"cpu": ("cpu", "reference", "sdpa"), "cuda": ("triton", "flex", "varlen", "sdpa", "dense")}
"""By kind of device."""
PEERS = {"sdpa": torch_peers.gathered, "dense": torch_peers.dense, "varlen": torch_peers.varlen, "flex": torch_peers.flex}
"""torch's own."""
HEADS = {"9/3x64": (9, 3, 64), "32/8x128": (32, 8, 128)}
"""Query heads / KV heads x width: SmolLM2-135M's, and the commonest of larger models."""
BLOCK_SIZE = 16
ROTATED_BYTES = 512 * 2**20
"""Layers take turns over at least so many bytes of keys and values."""
READ_BYTES = 512 * 2**20
TOLERANCE = {"float32": 1e-5, "bfloat16": 1e-2, "float16": 1e-3}


def add_options(parser: argparse.ArgumentParser) -> None:
    """How much, and on what."""
    known = sorted({*PEERS, *(name for names in BACKENDS.values() for name in names)})
    parser.add_argument("--backend", nargs="+", choices=known, help="(all of the device's)")
    parser.add_argument("--device", default="cpu", choices=list(BACKENDS), help="cpu (the default), cuda")
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
    device = torch.device(options.device)
    clock = clock_of(device, read_bytes)
    for heads in options.heads:
        step = _make_step(options, heads, rotated, device)
        for backend in options.backend or BACKENDS[device.type]:
            attend = _attention(backend, step)
            if attend is None:
                continue
            _check_answer(attend, step, options.dtype)
            yield {"bench": "attention", **_figures(options, backend, heads, attend, step, clock)}


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


def _make_step(options: argparse.Namespace, heads: str, rotated: int, device: "torch.device") -> Step:
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
    memory = KVMemory(geometry, sizing, device)
    for block in memory.buffer:
        block.copy_(torch.randn(block.shape, device=device))
    tables = (1 + torch.randperm(num_blocks - 1, dtype=torch.int32).view(options.batch, blocks_each)).to(device)
    lens = torch.full((options.batch,), options.context, device=device)
    batch = AttentionBatch.build(tables, torch.arange(options.batch + 1), lens, BLOCK_SIZE)
    q = torch.randn(options.batch, query_heads, width, device=device).to(dtype)
    return Step(q, list(memory.layers), batch, options.context)


def _attention(backend: str, step: Step) -> Attend | None:
    """None for what this torch does not have."""
    from ..model.attention_backend import CPU

    if backend in PEERS:
        return PEERS[backend](step)
    if backend == "reference":
        return _reference(step)
    if backend == "triton":
        from ..model.gpu_attention import GpuKernels

        kernel = GpuKernels().paged_attention
    else:
        kernel = CPU.paged_attention
    scale = step.q.shape[2] ** -0.5
    return lambda k_cache, v_cache: kernel(step.q, k_cache, v_cache, step.batch, scale=scale)


def _reference(step: Step) -> Attend:
    from ..model.attention_backend import REFERENCE

    scale = step.q.shape[2] ** -0.5
    return lambda k_cache, v_cache: REFERENCE.paged_attention(step.q, k_cache, v_cache, step.batch, scale=scale)


def _check_answer(attend: Attend, step: Step, dtype: str) -> None:
    import torch

    k_cache, v_cache = step.layers[-1]
    with torch.inference_mode():
        found, expected = attend(k_cache, v_cache).cpu().float(), _expected(step, k_cache, v_cache).float()
    worst = float((found - expected).abs().max())
    check(holds=worst <= TOLERANCE[dtype], what=f"it differs from the reference by {worst:.1e}")


def _expected(step: Step, k_cache: "Tensor", v_cache: "Tensor") -> "Tensor":
    """The reference's answer; to what a GPU answers the CPU's, since the reference would wait for the GPU at every step."""
    if step.q.device.type == "cpu":
        return _reference(step)(k_cache, v_cache)
    from ..kernels import AttentionBatch
    from ..model.attention_backend import CPU

    tables, starts, lens = (numbers.cpu() for numbers in step.batch.integers())
    batch = AttentionBatch.build(tables, starts, lens, BLOCK_SIZE)
    return CPU.paged_attention(step.q.cpu(), k_cache.cpu(), v_cache.cpu(), batch, scale=step.q.shape[2] ** -0.5)


def _figures(options: argparse.Namespace, backend: str, heads: str, attend: Attend, step: Step, clock: Clock) -> Row:
    import torch

    took, plain = [], []

    def attend_all() -> None:
        for k_cache, v_cache in step.layers:
            attend(k_cache, v_cache)

    with torch.inference_mode():
        if options.device != "cpu":
            attend_all()  # compiles, and takes memory
        for _ in range(options.rounds):
            plain.append(clock.plain_speed())
            took.append(clock.seconds(attend_all) / len(step.layers))
    speed, plain_speed = step.bytes_read / median(took), median(plain)
    share = {"fraction_of_copy": None, "fraction_of_read": None, clock.figure: round(speed / plain_speed, 3)}
    name = {"fraction_of_read": "read_gb_per_s", "fraction_of_copy": "copy_gb_per_s"}[clock.figure]
    return {
        "backend": backend,
        "dtype": options.dtype,
        "batch": options.batch,
        "context": options.context,
        "heads": heads,
        "threads": torch.get_num_threads(),
        "us": round(1e6 * median(took), 1),
        "gb_per_s": round(speed / 1e9, 2),
        name: round(plain_speed / 1e9, 2),
        **share,
    }
