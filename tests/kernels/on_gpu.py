"""Everything that only a GPU can show, in one command: `make gpu`, which is `python -m tests.kernels.on_gpu --report FILE`.

Before: there is a GPU. After: a report to keep: each kernel against its twin or attention over positions, the race of the parts
of a decode, captured steps against plain ones, and the figures beside their targets. Always: the first wrong answer ends it
with code 1 and stands in the report; nothing is timed before its answer is right. `--device cpu --smoke` goes through all of it
in Triton's interpreter, for the tests.
"""

import argparse
import json
import os
import platform
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import triton
from torch import Tensor

from blocktable import LLM, SamplingParams
from blocktable.bench import attention as bench_attention
from blocktable.bench.device_clock import Clock, clock_of
from blocktable.kernels import (
    AttentionBatch,
    block_moves,
    quantised,
    reference,
    triton_attention,
    triton_blocks,
    triton_cascade,
    triton_decode,
    triton_store,
)
from blocktable.model.decode_graphs import graphs_of
from tests.engine.reference import generate_reference
from tests.engine.tiny_llama import make_model, make_tokenizer
from tests.kernels.checks import assert_close
from tests.kernels.paged_case import Case, Length, Shape, make_case
from tests.kernels.triton_cases import CASES, TOLERANCE, case_of

MIB = 1 << 20


@dataclass(frozen=True)
class Place:
    """Where it runs, and how much of it."""

    device: torch.device
    is_smoke: bool

    def batch(self, case: Case) -> AttentionBatch:
        moved = case.tables.to(self.device), case.query_starts, case.seq_lens.to(self.device)
        return AttentionBatch.build(*moved, case.shape.block_size)

    def tensors(self, case: Case) -> tuple[Tensor, Tensor, Tensor]:
        """q and the caches, NaN where nobody looks."""
        q, k_cache, v_cache = (tensor.to(self.device) for tensor in (case.q, *case.pool(float("nan"))[1:]))
        return q, k_cache, v_cache

    def options(self, case: Case, *left_out: str) -> dict[str, Any]:
        named = {name: value for name, value in case.options.items() if name not in left_out}
        return {name: value.to(self.device) if isinstance(value, Tensor) else value for name, value in named.items()}


def attention(place: Place) -> Iterator[str]:
    """Every case of the pairwise cover."""
    for number, one in enumerate(CASES[:3] if place.is_smoke else CASES):
        case = case_of(one, number)
        out = triton_attention.paged_attention(*place.tensors(case), place.batch(case), **place.options(case))
        assert_close(out.cpu(), case.expected(), TOLERANCE[case.shape.dtype])
        yield f"case {number}: {one}"


def decode_race(place: Place) -> Iterator[str]:
    """Contexts of many parts, again and again: a race of the parts shows in some launches only."""
    lengths = [Length(1, 600), Length(1, 3)] if place.is_smoke else [Length(1, 5000), Length(1, 3), Length(1, 513)] * 30
    case = make_case(Shape(key_width=64, value_width=64, has_sinks=True), lengths)
    scratch, expected, launches = triton_decode.DecodeScratch(), case.expected(), 2 if place.is_smoke else 200
    bound = triton_decode.bind_decode(*place.tensors(case), place.batch(case), scratch=scratch, **place.options(case))
    for _ in range(launches):
        assert_close(bound().cpu(), expected, 1e-5)
    yield f"{launches} launches, bound once: {len(lengths)} contexts"


def captured(place: Place) -> Iterator[str]:
    """A bound decode in a graph of the device gives what it gives without."""
    graphs = graphs_of(place.device)
    if graphs is None:
        yield "left out: nothing captures on this device"
        return
    case = make_case(Shape(key_width=64, value_width=64), [Length(1, 700), Length(1, 40)])
    q, k_cache, v_cache = place.tensors(case)
    replay = graphs.capture(triton_decode.bind_decode(q, k_cache, v_cache, place.batch(case), **place.options(case)))
    for _ in range(3):
        assert_close(replay().cpu(), case.expected(), 1e-5)
        q.neg_()
        case.q.neg_()
    yield "3 replays over changing queries"


def cascades(place: Place) -> Iterator[str]:
    """A prefix that many share, of several parts."""
    shared = 64 if place.is_smoke else 4096
    lengths = [Length(1, shared + 5), *(Length(1, shared + 9 + i, shares=shared) for i in range(3 if place.is_smoke else 40))]
    for dtype in (torch.float32,) if place.is_smoke else TOLERANCE:
        case = make_case(Shape(grouped=4, key_width=64, value_width=64, has_slopes=True, dtype=dtype), lengths)
        batch = place.batch(case).with_prefixes(range(len(lengths)), [0, len(lengths)], [shared // 16])
        out = triton_cascade.cascade_decode(*place.tensors(case), batch, **place.options(case, "window"))
        assert_close(out.cpu(), case.expected(), TOLERANCE[dtype])
        yield f"{len(lengths)} share {shared} positions, {dtype}"


def stores(place: Place) -> Iterator[str]:
    """Rows as they are, and in one byte a number, against the twins."""
    k, v = torch.randn(33, 3, 80), torch.randn(33, 3, 80)
    slots = torch.randperm(5 * 16)[:33]
    slots[4] = -1
    formats = [torch.float32, torch.int8]
    if place.device.type == "cuda" and torch.cuda.get_device_capability(place.device) >= (8, 9):
        formats.append(torch.float8_e4m3fn)
    for stored in formats:
        found = []
        for device, modules in (("cpu", (reference, quantised)), (place.device, (triton_store, triton_store))):
            caches = [torch.zeros(5, 3, 16, 80).to(stored).to(device) for _ in range(2)]
            scales = [torch.ones(5, 3, 16, device=device) for _ in range(2)]
            given = (k.to(device), v.to(device), *caches)
            if stored == torch.float32:
                modules[0].store_kv(*given, slots.to(device))
            else:
                modules[1].store_kv_quantised(*given, *scales, slots.to(device))
            found.append([tensor.cpu().float() for tensor in (*caches, *scales)])
        for theirs, ours in zip(*found):
            differ = (theirs - ours).abs() > 1e-6 * theirs.abs()
            assert differ.float().mean() < 1e-3, f"{stored}: {int(differ.sum())} numbers differ"
        yield f"{stored}"


def moves(place: Place) -> Iterator[str]:
    """Blocks copied, gathered and scattered."""
    pools = [torch.arange(9.0 * 5000).view(9, 5000).to(device) for device in ("cpu", place.device)]
    pairs, blocks = torch.tensor([[3, 1], [3, 8], [0, 2]], dtype=torch.int32), torch.tensor([4, 0, 8], dtype=torch.int32)
    outs = []
    for module, pool in zip((block_moves, triton_blocks), pools):
        module.copy_blocks(pool, pairs.to(pool.device))
        out = torch.zeros(3, 5000, device=pool.device)
        module.gather_blocks(pool, blocks.to(pool.device), out)
        module.scatter_blocks(-out, blocks.to(pool.device), pool)
        outs += [out.cpu(), pool.cpu()]
    assert torch.equal(outs[0], outs[2])
    assert torch.equal(outs[1], outs[3])
    yield "copy, gather, scatter"


def engine(place: Place) -> Iterator[str]:
    """A tiny model's greedy text is transformers' own, with captured steps and without."""
    if place.device.type == "cpu":
        yield "left out: tests/kernels/test_triton_engine.py does it in the interpreter"
        return
    prompts = [[*range(40, 73), 5, 6, 7], [*range(40, 73), 9], [11, 12, 13, 14]]
    expected = generate_reference(make_model(), prompts, 24)
    for cuda_graphs in (True, False):
        llm = LLM(make_model(), tokenizer=make_tokenizer(), device="cuda", num_blocks=64, cuda_graphs=cuda_graphs)
        wanted = SamplingParams(temperature=0, max_tokens=24)
        outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], wanted)
        llm.shutdown()
        assert [list(output.outputs[0].token_ids) for output in outputs] == expected, f"cuda_graphs={cuda_graphs}"
        yield f"cuda_graphs={cuda_graphs}"


CHECKS: tuple[Callable[[Place], Iterator[str]], ...] = (attention, decode_race, captured, cascades, stores, moves, engine)


def decodes(place: Place) -> Iterator[dict[str, Any]]:
    """`bench attention`: few long contexts, many short ones."""
    sizes = [(2, 40)] if place.is_smoke else [(1, 131072), (8, 8192), (17, 4096), (64, 4096), (256, 2048)]
    parser = argparse.ArgumentParser()
    bench_attention.add_options(parser)
    for batch, context in sizes:
        given = ["--batch", str(batch), "--context", str(context), "--heads", "32/8x128"]
        given += ["--dtype", "float32", "--backend", "triton", "sdpa"] if place.is_smoke else ["--dtype", "bfloat16"]
        options = parser.parse_args(given)
        options.device, options.smoke = place.device.type, place.is_smoke
        for row in bench_attention.rows(options):
            is_large = 2 * batch * context * 8 * 128 * 2 >= 256 * MIB
            target = ">= 0.85 of copy" if row["backend"] == "triton" and is_large else None
            yield {"what": "decode", **row, "target": target, "met": target and (row["fraction_of_copy"] or 0) >= 0.85}


def others(place: Place) -> Iterator[dict[str, Any]]:
    """Stores, copies, one-byte rows and prompts, each beside its target."""
    clock = clock_of(place.device, MIB if place.is_smoke else 1024 * MIB)
    scale, dtype = 1 if place.is_smoke else 512, torch.float32 if place.is_smoke else torch.bfloat16
    tokens, width = 16 * scale, 128
    caches = [torch.zeros(scale + 1, 8, 16, width, dtype=dtype, device=place.device) for _ in range(2)]
    k = torch.randn(tokens, 8, width, device=place.device).to(dtype)
    slots = 16 + torch.randperm(tokens).to(place.device)
    yield _share(clock, "store", 4 * k.nbytes, lambda: triton_store.store_kv(k, k, *caches, slots))
    pool = torch.ones(2 * scale + 1, MIB // 4 if not place.is_smoke else 64, device=place.device)
    pairs = torch.stack([torch.arange(scale), torch.arange(scale) + scale], 1).int().to(place.device)
    yield _share(clock, "copy", 2 * scale * pool[0].nbytes, lambda: triton_blocks.copy_blocks(pool, pairs))
    if place.is_smoke:
        return
    yield from _one_byte(place, clock)
    length, heads = 8192, 32
    case = torch.randn(length, heads, width, device=place.device).to(dtype)
    tables = torch.arange(1, scale + 1, dtype=torch.int32, device=place.device).unsqueeze(0)
    lens = torch.tensor([length], device=place.device)
    batch = AttentionBatch.build(tables, torch.tensor([0, length]), lens, 16)
    bound = triton_attention.bind_attention(case, *caches, batch, scale=width**-0.5)
    bound()
    seconds = min(clock.seconds(bound) for _ in range(5))
    flops = 4 * length * length * heads * width / 2 / seconds
    yield {
        "what": "prefill",
        "us": round(1e6 * seconds, 1),
        "tflop_per_s": round(flops / 1e12, 1),
        "target": ">= 400",
        "met": flops >= 4e14,
    }


def _share(clock: Clock, what: str, num_bytes: int, run: Callable[[], object]) -> dict[str, Any]:
    run()
    seconds = min(clock.seconds(run) for _ in range(5))
    share = num_bytes / seconds / max(clock.plain_speed() for _ in range(3))
    return {
        "what": what,
        "us": round(1e6 * seconds, 1),
        clock.figure: round(share, 3),
        "target": ">= 0.85 of copy",
        "met": share >= 0.85,
    }


def _one_byte(place: Place, clock: Clock) -> Iterator[dict[str, Any]]:
    """Decodes over rows of one byte a number beside those over bfloat16, by the same kernel."""
    blocks, context = 64 * 256, 4096
    q = torch.randn(64, 32, 128, device=place.device).to(torch.bfloat16)
    tables = torch.randperm(blocks).int().view(64, -1).to(place.device)
    batch = AttentionBatch.build(tables, torch.arange(65), torch.full((64,), context, device=place.device), 16)
    scales = {name: torch.ones(blocks, 8, 16, device=place.device) for name in ("k_scales", "v_scales")}
    took = {}
    for stored in (torch.bfloat16, torch.int8):
        caches = [torch.ones(blocks, 8, 16, 128, device=place.device).to(stored) for _ in range(2)]
        more = scales if stored == torch.int8 else {}
        bound = triton_attention.bind_attention(q, *caches, batch, scale=0.1, **more)
        bound()
        took[stored] = min(clock.seconds(bound) for _ in range(5))
    times = took[torch.bfloat16] / took[torch.int8]
    yield {"what": "decode, int8 rows", "times_bfloat16": round(times, 2), "target": ">= 1.8", "met": times >= 1.8}


def main(given: list[str]) -> int:
    """Run it all; 2 without a GPU, 1 after a wrong answer."""
    parser = argparse.ArgumentParser(prog="python -m tests.kernels.on_gpu")
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--smoke", action="store_true", help="a little of everything")
    parser.add_argument("--report", type=Path, help="also write it there")
    options = parser.parse_args(given)
    if options.device == "cuda" and not torch.cuda.is_available():
        print("there is no GPU that torch can use", file=sys.stderr)
        return 2
    place = Place(torch.device(options.device), options.smoke)
    lines = [f"# Kernels on {_name(place.device)}", "", *(f"- {line}" for line in _versions()), ""]
    status = 0
    try:
        for line in _told(place):
            print(line, flush=True)
            lines.append(line)
    except AssertionError as error:
        lines.append(f"WRONG: {error}")
        print(lines[-1], flush=True)
        status = 1
    if options.report is not None:
        options.report.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return status


def _told(place: Place) -> Iterator[str]:
    for check in CHECKS:
        for line in check(place):
            yield f"- right: {check.__name__}: {line}"
    for rows in (decodes, others):
        for row in rows(place):
            yield f"- {json.dumps(row)}"


def _name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "Triton's interpreter"


def _versions() -> list[str]:
    now = time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime())
    return [f"torch {torch.__version__}, triton {triton.__version__}, Python {platform.python_version()}", f"{now} UTC"]


if __name__ == "__main__":
    if "cpu" in sys.argv:
        # Before any kernel is defined: the modules above were imported with it already, by the tests that start this.
        if os.environ.get("TRITON_INTERPRET") != "1":
            sys.exit("--device cpu needs TRITON_INTERPRET=1")
        from tests.kernels import interpreter

        interpreter.mend()
    sys.exit(main(sys.argv[1:]))
