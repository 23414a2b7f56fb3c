"""Everything that only a GPU can show, in one command: `make gpu`, which is `python -m tests.kernels.on_gpu --report FILE`.

Before: there is a GPU. After: a report to keep: each kernel against its twin or attention over positions, the race of the parts
of a decode, captured steps against plain ones, and the figures beside their targets (`gpu_figures.py`). Always: what is wrong
stands in the report, which is written line by line, and makes the exit code 1; the rest is looked at all the same, since a GPU
may be there for minutes only. `--device cpu --smoke` goes through all of it in Triton's interpreter, for the tests.
"""

import argparse
import json
import os
import platform
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from traceback import format_exception
from typing import Any

import torch
import triton
from torch import Tensor

from blocktable import LLM, SamplingParams
from blocktable.engine import build
from blocktable.kernels import (
    AttentionBatch,
    block_moves,
    quantised,
    reference,
    rope,
    triton_attention,
    triton_blocks,
    triton_cascade,
    triton_decode,
    triton_rope,
    triton_store,
)
from blocktable.model import attention_backend, decode_graphs
from blocktable.model.decode_graphs import graphs_of
from tests.engine.reference import generate_reference
from tests.engine.tiny_llama import make_model, make_tokenizer
from tests.kernels import gpu_figures
from tests.kernels.checks import assert_close
from tests.kernels.paged_case import Case, Length, Shape, make_case
from tests.kernels.triton_cases import CASES, DECODES, LENGTHS, TOLERANCE, case_of


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
    """Every case of the pairwise cover, of chunks and of single queries."""
    for number, one in enumerate(CASES[:3] if place.is_smoke else CASES):
        for attend, lengths in ((triton_attention.paged_attention, LENGTHS), (triton_decode.paged_decode, DECODES)):
            case = case_of(one, number, lengths)
            out = attend(*place.tensors(case), place.batch(case), **place.options(case))
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
    """A decode in a graph of the device gives what it gives without, for lengths that only the device knows."""
    graphs = graphs_of(place.device)
    if graphs is None:
        yield "left out: nothing captures on this device"
        return
    case = make_case(Shape(key_width=64, value_width=64), [Length(1, 1700), Length(1, 40)])
    q, k_cache, v_cache = place.tensors(case)
    tables, lens = case.tables.int().to(place.device), case.seq_lens.int().to(place.device)
    starts, scratch = torch.arange(3, dtype=torch.int32, device=place.device), triton_decode.DecodeScratch()

    def run() -> Tensor:
        batch = AttentionBatch.unread(tables, starts, lens, 16, end_block=case.num_blocks, most_parts=6)
        return triton_decode.paged_decode(q, k_cache, v_cache, batch, scratch=scratch, **place.options(case))

    replay = graphs.capture(run)
    for length in (1700, 1025, 512, 1):
        lens[0] = length
        # Eagerly, with lengths that are known.
        batch = AttentionBatch.build(tables, case.query_starts, lens, 16)
        expected = triton_attention.paged_attention(q, k_cache, v_cache, batch, **place.options(case))
        assert_close(replay().cpu(), expected.cpu().double(), 1e-5)
    yield "4 replays over changing lengths"


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


def ropes(place: Place) -> Iterator[str]:
    """Rotation and store in one launch, against the twin."""
    torch.manual_seed(0)
    slots = torch.randperm(5 * 16)[:33]
    slots[4] = -1
    given = torch.randn(33, 6, 80), torch.randn(33, 3, 80), torch.randn(33, 3, 80), torch.randn(33, 64), torch.randn(33, 64)
    found = []
    for device, module in (("cpu", rope), (place.device, triton_rope)):
        caches = [torch.zeros(5, 3, 16, 80, device=device) for _ in range(2)]
        q = module.rope_store_kv(*(tensor.to(device) for tensor in given), *caches, slots.to(device))
        found.append([tensor.cpu() for tensor in (q, *caches)])
    for theirs, ours in zip(*found):
        assert_close(ours, theirs.double(), 1e-5)
    yield "33 tokens, 64 of 80 numbers of a head rotated"


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
    graphs = gpu_figures.Counted(decode_graphs.CudaGraphs())
    own, build.graphs_of = build.graphs_of, lambda device: graphs
    try:
        for cuda_graphs in (True, False):
            llm = LLM(make_model().to(place.device), tokenizer=make_tokenizer(), num_blocks=64, cuda_graphs=cuda_graphs)
            wanted = SamplingParams(temperature=0, max_tokens=24)
            before = graphs.captured
            outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], wanted)
            llm.shutdown()
            assert [list(output.outputs[0].token_ids) for output in outputs] == expected, f"cuda_graphs={cuda_graphs}"
            captured = graphs.captured - before
            assert bool(captured) == cuda_graphs, f"cuda_graphs={cuda_graphs}: {captured} steps were captured"
            yield f"cuda_graphs={cuda_graphs}: {captured} steps captured"
    finally:
        build.graphs_of = own


CHECKS: tuple[Callable[[Place], Iterator[str]], ...] = (
    attention,
    decode_race,
    captured,
    cascades,
    stores,
    ropes,
    moves,
    engine,
)


def main(given: list[str]) -> int:
    """Run it all; 2 without a GPU, 1 after a wrong answer."""
    parser = argparse.ArgumentParser(prog="python -m tests.kernels.on_gpu")
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--smoke", action="store_true", help="a little of everything")
    names = [part.__name__ for part in (*CHECKS, *gpu_figures.PARTS)]
    parser.add_argument("--only", nargs="+", choices=names, default=names, help="these parts (all)")
    parser.add_argument("--report", type=Path, help="also write it there")
    options = parser.parse_args(given)
    if options.device == "cuda" and not torch.cuda.is_available():
        print("there is no GPU that torch can use", file=sys.stderr)
        return 2
    place = Place(torch.device(options.device), options.smoke)
    report = Report(options.report)
    for line in (f"# Kernels on {_name(place.device)}", "", *(f"- {line}" for line in _versions()), ""):
        report.write(line)
    for check in (check for check in CHECKS if check.__name__ in options.only):
        with report.telling(check.__name__):
            for line in check(place):
                report.write(f"- right: {check.__name__}: {line}")
    for part in (part for part in gpu_figures.PARTS if part.__name__ in options.only):
        with report.telling(part.__name__):
            for row in part(place.device, is_smoke=place.is_smoke):
                report.write(f"- {json.dumps(row)}")
    report.write(f"- {report.verdict}")
    return int(report.num_wrong > 0)


class Report:
    """Lines that are printed, and kept at once, since the machine may be taken back in the middle."""

    def __init__(self, path: Path | None) -> None:
        self.num_wrong = 0
        self._missed = 0
        self._path = path
        if path is not None:
            path.write_text("", encoding="utf-8")

    def write(self, line: str) -> None:
        print(line, flush=True)
        self._missed += '"verdict": "MISSED"' in line
        if self._path is not None:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(f"{line}\n")

    @contextmanager
    def telling(self, name: str) -> Iterator[None]:
        """What goes wrong inside is told and counted."""
        try:
            yield
        except Exception as error:
            self.num_wrong += 1
            wrong = isinstance(error, AssertionError)
            self.write(f"WRONG: {name}: {error}" if wrong else f"FAILED: {name}: {''.join(format_exception(error)[-4:])}")

    @property
    def verdict(self) -> str:
        """The last line."""
        return f"{self.num_wrong} checks wrong, {self._missed} targets missed"


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
        objection = attention_backend._objection
        attention_backend._objection = lambda name, *rest: None if name == "triton" else objection(name, *rest)
    sys.exit(main(sys.argv[1:]))
