"""What `make gpu` measures: each figure beside its target, and torch's own ways of doing the same beside ours.

Before: `on_gpu.py` has found the kernels right. After: rows of its report. Always: a row says its target and its verdict; the
answer of what is timed was compared first, at the size that is timed; a peer that cannot run is a row too.
"""

import argparse
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from blocktable.bench import attention as bench_attention
from blocktable.bench.device_clock import Clock, clock_of
from blocktable.bench.host_step import blocks_for, host_step
from blocktable.kernels import (
    AttentionBatch,
    quantised,
    rope,
    triton_attention,
    triton_blocks,
    triton_cascade,
    triton_decode,
    triton_rope,
    triton_store,
)
from blocktable.model.decode_graphs import Graphs, Run, graphs_of
from blocktable.model.kv_memory import KVMemory
from blocktable.model.kv_sizing import size_kv
from blocktable.model.loader import wrap_model
from blocktable.model.runner import ModelRunner
from tests.engine.tiny_llama import VOCAB_SIZE, make_model

MIB = 1 << 20
LARGE_BYTES = 256 * MIB
"""Of keys and values, from which on a decode has a target."""
Row = dict[str, Any]


@dataclass(frozen=True)
class Sizes:
    """How much is measured."""

    decodes: tuple[tuple[int, int], ...]  # sequences, positions of each
    prompt: int
    rows: tuple[int, int]  # sequences, positions of each, for rows of one byte a number
    shared: tuple[int, int, int]  # sequences, positions that all share, positions of each one's own
    tokens: int  # that are stored
    blocks: int  # that are copied
    block_numbers: int
    host: tuple[int, int, int]  # sequences, positions, steps
    heads: tuple[int, int]  # of queries, of keys and values, 128 numbers wide
    rounds: int  # of which the quickest counts
    layers: int


FULL = Sizes(
    decodes=((1, 131072), (8, 8192), (17, 4096), (64, 4096), (256, 2048)),
    prompt=8192,
    rows=(64, 4096),
    shared=(64, 4096, 256),
    tokens=65536,
    blocks=512,
    block_numbers=MIB // 4,
    host=(256, 1024, 100),
    heads=(32, 8),
    rounds=5,
    layers=32,
)
SMOKE = Sizes(
    decodes=((2, 40),),
    prompt=24,
    rows=(2, 40),
    shared=(2, 32, 8),
    tokens=32,
    blocks=2,
    block_numbers=64,
    host=(3, 20, 4),
    heads=(4, 2),
    rounds=1,
    layers=2,
)


def judged(row: Row, target: str, *, holds: bool) -> Row:
    """The row with what was asked for, and whether that is so."""
    return row | {"target": target, "verdict": "met" if holds else "MISSED"}


def compared(row: Row) -> Row:
    """A row that nothing was asked of."""
    return row | {"target": "none", "verdict": "for comparison"}


def decodes(device: torch.device, *, is_smoke: bool) -> Iterator[Row]:
    """`bench attention`, few long contexts and many short ones: ours, torch's paged attention, dense attention as a ceiling."""
    sizes = _sizes(is_smoke=is_smoke)
    for batch, context in sizes.decodes:
        is_large = 2 * batch * context * 8 * 128 * 2 >= LARGE_BYTES
        ours = None
        for backend in bench_attention.BACKENDS["cuda"]:
            try:
                found = list(_bench_rows(backend, batch, context, device, is_smoke=is_smoke))
            except Exception as error:
                if backend == "triton":
                    raise
                yield compared(
                    {"what": "decode", "backend": backend, "batch": batch, "context": context, "failed": repr(error)[:400]}
                )
                continue
            if not found:
                name = {"what": "decode", "backend": backend, "batch": batch, "context": context}
                yield compared(name | {"failed": "this torch does not have it"})
            for row in found:
                row = {"what": "decode", **row}
                if backend == "triton":
                    ours = row["us"]
                    share = row["fraction_of_copy"] or 0
                    yield judged(row, ">= 0.85 of copy", holds=share >= 0.85) if is_large else compared(row)
                else:
                    yield compared(row | {"times_ours": round(row["us"] / ours, 2) if ours else None})


def _bench_rows(backend: str, batch: int, context: int, device: torch.device, *, is_smoke: bool) -> Iterator[Row]:
    parser = argparse.ArgumentParser()
    bench_attention.add_options(parser)
    given = ["--batch", str(batch), "--context", str(context), "--heads", "32/8x128", "--backend", backend]
    options = parser.parse_args([*given, "--dtype", "float32" if is_smoke else "bfloat16"])
    options.device, options.smoke = device.type, is_smoke
    yield from bench_attention.rows(options)


def one_byte(device: torch.device, *, is_smoke: bool) -> Iterator[Row]:
    """Decodes over rows of one byte a number beside those over two, by the same kernel."""
    sizes, clock = _sizes(is_smoke=is_smoke), _clock(device, is_smoke=is_smoke)
    num_seqs, context = sizes.rows
    each = -(-context // 16)
    dtype = _half(device)
    q = torch.randn(num_seqs, sizes.heads[0], 128, device=device).to(dtype)
    tables = torch.randperm(num_seqs * each).int().view(num_seqs, each).to(device)
    batch = AttentionBatch.build(tables, torch.arange(num_seqs + 1), torch.full((num_seqs,), context, device=device), 16)
    caches = [torch.randn(num_seqs * each, sizes.heads[1], 16, 128, device=device).to(dtype) for _ in range(2)]
    plain = triton_decode.bind_decode(q, *caches, batch, scale=128**-0.5)
    expected, seconds = plain().float(), _least(clock, plain, sizes.rounds)
    for stored in (torch.float8_e4m3fn, torch.int8):
        name = {"what": f"decode, rows of {stored}", "batch": num_seqs, "context": context}
        if stored == torch.float8_e4m3fn and device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 9):
            yield compared(name | {"failed": "this GPU has no such format"})
            continue
        (k, k_scales), (v, v_scales) = (quantised.quantise(cache, stored) for cache in caches)
        bound = triton_decode.bind_decode(q, k, v, batch, scale=128**-0.5, k_scales=k_scales, v_scales=v_scales)
        _near(bound(), expected, 0.1, f"rows of {stored}")
        times = seconds / _least(clock, bound, sizes.rounds)
        yield judged(name | {"times_two_bytes": round(times, 2)}, ">= 1.8", holds=times >= 1.8)


def stored_rows(device: torch.device, *, is_smoke: bool) -> Iterator[Row]:
    """New rows to their slots, rotated or not, and whole blocks to others."""
    sizes, clock = _sizes(is_smoke=is_smoke), _clock(device, is_smoke=is_smoke)
    scale, tokens, dtype = sizes.blocks, sizes.tokens, _half(device)
    caches = [torch.zeros(1 + tokens // 16, sizes.heads[1], 16, 128, dtype=dtype, device=device) for _ in range(2)]
    k, v = (torch.randn(tokens, sizes.heads[1], 128, device=device).to(dtype) for _ in range(2))
    slots = 16 + torch.randperm(tokens).to(device)
    yield _share(clock, sizes.rounds, "store", 4 * k.nbytes, lambda: triton_store.store_kv(k, v, *caches, slots), asked=True)
    for rows, cache in zip((k, v), caches):
        assert torch.equal(cache[slots // 16, :, slots % 16], rows), "store: another row lies in a slot"
    q, angles = (
        torch.randn(tokens, sizes.heads[0], 128, device=device).to(dtype),
        torch.randn(2, tokens, 128, device=device).to(dtype),
    )
    run: Callable[[], Tensor] = lambda: triton_rope.rope_store_kv(q, k, v, *angles, *caches, slots)  # noqa: E731
    _near(run(), rope.rotated(q, *angles).float(), 0.5, "rotated queries")  # two bytes leave 0.25 of 32
    yield _share(clock, sizes.rounds, "rope and store", 2 * q.nbytes + 4 * k.nbytes + angles.nbytes, run, asked=False)
    pool = torch.randn(2 * scale + 1, sizes.block_numbers, device=device)
    pairs = torch.stack([torch.arange(scale), torch.arange(scale) + scale], 1).int().to(device)
    yield _share(
        clock, sizes.rounds, "copy", 2 * scale * pool[0].nbytes, lambda: triton_blocks.copy_blocks(pool, pairs), asked=True
    )
    assert torch.equal(pool[:scale], pool[scale : 2 * scale]), "copy: a block differs from its source"


def prefills(device: torch.device, *, is_smoke: bool) -> Iterator[Row]:
    """One prompt, causal: ours over blocks, torch's fused attention over keys and values side by side."""
    sizes, clock = _sizes(is_smoke=is_smoke), _clock(device, is_smoke=is_smoke)
    length, heads, dtype = sizes.prompt, sizes.heads[0], _half(device)
    blocks = -(-length // 16)
    q = torch.randn(length, heads, 128, device=device).to(dtype)
    caches = [torch.randn(blocks, sizes.heads[1], 16, 128, device=device).to(dtype) for _ in range(2)]
    tables = torch.randperm(blocks).int().view(1, -1).to(device)
    batch = AttentionBatch.build(tables, torch.tensor([0, length]), torch.tensor([length], device=device), 16)
    ours = triton_attention.bind_attention(q, *caches, batch, scale=128**-0.5)
    k, v = (cache[tables[0].long()].transpose(0, 1).flatten(1, 2)[:, :length].unsqueeze(0) for cache in caches)
    wide = q.transpose(0, 1).unsqueeze(0)

    def dense() -> Tensor:
        return torch.nn.functional.scaled_dot_product_attention(wide, k, v, is_causal=True, enable_gqa=True)

    _near(ours(), dense()[0].transpose(0, 1).float(), 0.05, "a prompt")
    flops = 4 * length * length * heads * 128 / 2
    for backend, run in (("triton", ours), ("sdpa, dense", dense)):
        speed = flops / _least(clock, run, sizes.rounds)
        row = {"what": "prefill", "backend": backend, "tokens": length, "tflop_per_s": round(speed / 1e12, 1)}
        yield judged(row, ">= 400 TFLOP/s", holds=speed >= 4e14) if backend == "triton" else compared(row)


def shared_prefixes(device: torch.device, *, is_smoke: bool) -> Iterator[Row]:
    """A prefix of many: the cascade beside the decode that reads it again for each."""
    sizes, clock = _sizes(is_smoke=is_smoke), _clock(device, is_smoke=is_smoke)
    num_seqs, shared, own = sizes.shared
    dtype, context = _half(device), shared + own
    each = -(-own // 16)
    blocks = shared // 16 + num_seqs * each
    ids = torch.randperm(blocks).int()
    tables = torch.cat([ids[: shared // 16].expand(num_seqs, -1), ids[shared // 16 :].view(num_seqs, each)], 1).contiguous()
    lens = torch.full((num_seqs,), context, device=device)
    batch = AttentionBatch.build(tables.to(device), torch.arange(num_seqs + 1), lens, 16)
    grouped = batch.with_prefixes(range(num_seqs), [0, num_seqs], [shared // 16])
    q = torch.randn(num_seqs, sizes.heads[0], 128, device=device).to(dtype)
    caches = [torch.randn(blocks, sizes.heads[1], 16, 128, device=device).to(dtype) for _ in range(2)]
    plain = triton_decode.bind_decode(q, *caches, batch, scale=128**-0.5)
    cascade = triton_cascade.bind_cascade(q, *caches, grouped, scale=128**-0.5)
    _near(cascade(), plain().float(), 0.05, "a shared prefix")
    times = _least(clock, plain, sizes.rounds) / _least(clock, cascade, sizes.rounds)
    row = {"what": "cascade", "batch": num_seqs, "shared": shared, "own": own, "times_decode": round(times, 2)}
    yield compared(row)


def host_steps(device: torch.device, *, is_smoke: bool) -> Iterator[Row]:
    """Scheduler, inputs and launch of a decode step of a model of many thin layers."""
    sizes = _sizes(is_smoke=is_smoke)
    batch, context, steps = sizes.host
    model = make_model(num_hidden_layers=sizes.layers, max_position_embeddings=context + 4 * steps)
    loaded = wrap_model(model.to(device=device, dtype=_half(device)), self_check=False)
    num_blocks = blocks_for(batch, context, 16, steps)
    memory = KVMemory(loaded.geometry, size_kv(loaded.geometry, 16, loaded.device, num_blocks=num_blocks), loaded.device)
    graphs = Counted(graphs_of(device) or NoDevice())
    runner = ModelRunner(loaded, memory, "triton", graphs)
    wait = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    found = host_step(runner, batch=batch, context=context, block_size=16, vocab_size=VOCAB_SIZE, steps=steps, wait=wait)
    assert graphs.captured, "host: no step was captured"
    row = {"what": "host, a decode step", "batch": batch, "context": context, "layers": sizes.layers, **found}
    yield judged(row, "<= 150 us", holds=found["us"] <= 150)


class Counted:
    """Graphs, and how many were captured."""

    def __init__(self, graphs: Graphs) -> None:
        self.captured = 0
        self._graphs = graphs

    def capture(self, run: Run) -> Run:
        captured = self._graphs.capture(run)
        self.captured += 1
        return captured


class NoDevice:
    """Graphs of a device that there is not: a step runs once, and its answer is kept."""

    def capture(self, run: Run) -> Run:
        out = run()
        return lambda: out


PARTS: tuple[Callable[..., Iterator[Row]], ...] = (decodes, one_byte, stored_rows, prefills, shared_prefixes, host_steps)
"""In their order; each called with a device, and whether small sizes do, whose figures mean nothing."""


def _sizes(*, is_smoke: bool) -> Sizes:
    return SMOKE if is_smoke else FULL


def _clock(device: torch.device, *, is_smoke: bool) -> Clock:
    return clock_of(device, MIB if is_smoke else 1024 * MIB)


def _half(device: torch.device) -> torch.dtype:
    """Two bytes a number; on a CPU four, since the interpreter is there for its answers."""
    return torch.bfloat16 if device.type == "cuda" else torch.float32


def _near(found: Tensor, expected: Tensor, tolerance: float, what: str) -> None:
    worst = float((found.float() - expected).abs().max())
    assert worst <= tolerance, f"{what}: differs by {worst:.1e}, more than {tolerance}"


def _least(clock: Clock, run: Callable[[], object], rounds: int) -> float:
    run()
    return min(clock.seconds(run) for _ in range(rounds))


def _share(clock: Clock, rounds: int, what: str, num_bytes: int, run: Callable[[], object], *, asked: bool) -> Row:
    seconds = _least(clock, run, rounds)
    share = num_bytes / seconds / max(clock.plain_speed() for _ in range(3))
    row = {"what": what, "us": round(1e6 * seconds, 1), clock.figure: round(share, 3)}
    return judged(row, ">= 0.85 of copy", holds=share >= 0.85) if asked else compared(row)
