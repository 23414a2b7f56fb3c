"""Runs every Triton kernel over memory between protected pages: `python -m tests.kernels.guarded`. A line of JSON for each run.

Before: `test_guard_pages.py` starts it. After: a run that touched what it should not was ended by the system. Always: each
tensor that a kernel is launched with is moved to memory of its own, of which the first or the last byte lies at a page that
nobody may touch; of a view that is what lies between its own first and last element. A run is a process of its own, forked off
this one."""

import ctypes
import faulthandler
import json
import mmap
import os
import resource
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

os.environ["TRITON_INTERPRET"] = "1"

from tests.kernels import interpreter
from tests.kernels.implementations import Change, changed
from tests.kernels.paged_case import Case, Length, Shape, make_case

PAGE = mmap.PAGESIZE
_LIBC = ctypes.CDLL(None, use_errno=True)
_MAPS: list[mmap.mmap] = []


def between_guards(num_bytes: int, *, at_end: bool) -> Tensor:
    """`num_bytes` bytes, [num_bytes] uint8, with a protected page directly behind them, or directly before them."""
    pages = -(-num_bytes // PAGE)
    memory = mmap.mmap(-1, (pages + 2) * PAGE)
    _MAPS.append(memory)
    base = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    for page in (0, pages + 1):
        if _LIBC.mprotect(ctypes.c_void_p(base + page * PAGE), PAGE, 0) != 0:
            raise OSError(ctypes.get_errno(), "mprotect")
    offset = (pages + 1) * PAGE - num_bytes if at_end else PAGE
    return torch.frombuffer(memory, dtype=torch.uint8, count=num_bytes, offset=offset)


class Guard:
    """Stands in place of a launch. Tensors that are the same view stay the same; what was written comes back."""

    def __init__(self, *, at_end: bool) -> None:
        self.at_end = at_end

    def __call__(self, kernel: Any, grid: Any, arguments: tuple[Any, ...], constants: dict[str, Any]) -> None:
        moved: dict[tuple[Any, ...], tuple[Tensor, Tensor]] = {}
        own = [self._move(one, moved) if isinstance(one, Tensor) else one for one in arguments]
        kernel[grid](*own, **constants)
        for original, copy in moved.values():
            original.copy_(copy)

    def _move(self, tensor: Tensor, moved: dict[tuple[Any, ...], tuple[Tensor, Tensor]]) -> Tensor:
        key = (tensor.data_ptr(), tensor.shape, tensor.stride())
        if key not in moved:
            strides = [step if size > 1 else 0 for size, step in zip(tensor.shape, tensor.stride())]
            elements = 1 + sum((size - 1) * step for size, step in zip(tensor.shape, strides)) if tensor.numel() else 0
            line = between_guards(elements * tensor.element_size(), at_end=self.at_end).view(tensor.dtype)
            copy = line.as_strided(tensor.shape, tensor.stride())
            copy.copy_(tensor)
            moved[key] = (tensor, copy)
        return moved[key][1]


Kernels = dict[str, ModuleType]
# Every block is full, so that the last slot of the last block is read; a width that its class does not fill.
SHAPE = Shape(block_size=8, kv_heads=2, grouped=3, key_width=24, value_width=24, has_sinks=True, has_slopes=True)


def _case(*lengths: Length) -> Case:
    torch.manual_seed(0)
    case = make_case(SHAPE, list(lengths))
    used = -(-max(length.seq_len for length in lengths) // SHAPE.block_size)
    case.tables = case.tables[:, :used].contiguous()  # without the spare column
    used_ids = case.tables[case.tables >= 0]
    case.tables[case.tables == int(used_ids.max())] = case.num_blocks - 1
    return case


def _batch(kernels: Kernels, case: Case) -> Any:
    build = kernels["attention_batch"].AttentionBatch.build
    return build(case.tables, case.query_starts, case.seq_lens, SHAPE.block_size)


def attention(kernels: Kernels, guard: Guard) -> None:
    """Chunks and a decode."""
    case = _case(Length(3, 24), Length(1, 24), Length(5, 32))
    attend = kernels["triton_attention"].paged_attention
    attend(case.q, *case.pool(0.0)[1:], _batch(kernels, case), launch=guard, **case.options)


def quantised(kernels: Kernels, guard: Guard) -> None:
    """The same over one byte a number."""
    case = _case(Length(3, 24), Length(5, 32))
    caches = [cache.to(torch.int8) for cache in case.pool(0.0)[1:]]
    scales = {name: torch.ones(case.num_blocks, 2, 8) for name in ("k_scales", "v_scales")}
    attend = kernels["triton_attention"].paged_attention
    attend(case.q, *caches, _batch(kernels, case), launch=guard, **case.options, **scales)


def decode(kernels: Kernels, guard: Guard) -> None:
    """A context of two parts, beside short ones."""
    case = _case(Length(1, 24), Length(1, 8), Length(1, 520))
    attend = kernels["triton_decode"].paged_decode
    attend(case.q, *case.pool(0.0)[1:], _batch(kernels, case), launch=guard, **case.options)


def cascade(kernels: Kernels, guard: Guard) -> None:
    """Three that share, in a tile with room for five."""
    case = _case(Length(1, 24), Length(1, 32, shares=16), Length(1, 24, shares=16))
    batch = _batch(kernels, case).with_prefixes([0, 1, 2], [0, 3], [2])
    options = {name: value for name, value in case.options.items() if name != "window"}
    kernels["triton_cascade"].cascade_decode(case.q, *case.pool(0.0)[1:], batch, launch=guard, **options)


def store(kernels: Kernels, guard: Guard) -> None:
    """Three heads in programs of four; the first slot, the last, and none."""
    k, v = torch.rand(3, 3, 24), torch.rand(3, 3, 24)
    caches = [torch.zeros(4, 3, 8, 24) for _ in range(2)]
    kernels["triton_store"].store_kv(k, v, *caches, torch.tensor([-1, 0, 31]), launch=guard)


def store_quantised(kernels: Kernels, guard: Guard) -> None:
    """The same with scales."""
    k, v = torch.rand(3, 3, 24), torch.rand(3, 3, 24)
    caches = [torch.zeros(4, 3, 8, 24, dtype=torch.int8) for _ in range(2)]
    scales = [torch.ones(4, 3, 8) for _ in range(2)]
    kernels["triton_store"].store_kv_quantised(k, v, *caches, *scales, torch.tensor([-1, 0, 31]), launch=guard)


def rope(kernels: Kernels, guard: Guard) -> None:
    """Heads that no number of programs fills, of which a part is rotated."""
    q, k, v = torch.rand(3, 5, 24), torch.rand(3, 3, 24), torch.rand(3, 3, 24)
    caches = [torch.zeros(4, 3, 8, 24) for _ in range(2)]
    cos, slots = torch.rand(3, 16), torch.tensor([-1, 0, 31])
    kernels["triton_rope"].rope_store_kv(q, k, v, cos, cos, *caches, slots, launch=guard)


def blocks(kernels: Kernels, guard: Guard) -> None:
    """Blocks that a piece does not fill: copied, gathered and scattered."""
    moves, pool = kernels["triton_blocks"], torch.rand(5, 300)
    moves.copy_blocks(pool, torch.tensor([[0, 4], [1, 2]], dtype=torch.int32), launch=guard)
    ids, rows = torch.tensor([4, 0], dtype=torch.int32), torch.rand(2, 300)
    moves.gather_blocks(pool, ids, rows, launch=guard)
    moves.scatter_blocks(rows, ids, pool, launch=guard)


RUNS: dict[str, Callable[[Kernels, Guard], None]] = {
    run.__name__: run for run in (attention, quantised, decode, cascade, store, store_quantised, rope, blocks)
}
FAULTS: dict[str, tuple[str, Change]] = {
    # name: (run that must be ended, fault)
    "queries behind the last one": (
        "attention",
        ("triton_tiles", "mask=is_row[:, None] & (key_d < key_width)[None, :]", "mask=(key_d < key_width)[None, :]"),
    ),
    "answers behind the last one": (
        "attention",
        ("triton_attention", "is_answer = is_row[:, None] &", "is_answer = (row >= 0)[:, None] &"),
    ),
    "sinks of heads behind the last one": (
        "attention",
        ("triton_attention", "tl.load(sink_ptr + head, mask=is_row,", "tl.load(sink_ptr + head + 1, mask=is_row,"),
    ),
    "pages behind the last tile": ("attention", ("triton_tiles", "mask=later < end, other=0", "mask=later >= 0, other=0")),
    "numbers behind a key": (
        "attention",
        ("triton_tiles", "mask=is_column[None, :] & is_key[:, None]", "mask=is_column[None, :]"),
    ),
    "numbers behind a value": (
        "decode",
        ("triton_tiles", "mask=is_column[:, None] & is_value[None, :]", "mask=is_column[:, None]"),
    ),
    "scales of the block behind": (
        "quantised",
        ("triton_tiles", "scale_rows = page * scale_block + slot", "scale_rows = (page + 1) * scale_block + slot"),
    ),
    "heads behind the last one": (
        "decode",
        ("triton_decode", "answers, mask=is_row[:, None] & is_value[None, :]", "answers, mask=is_value[None, :]"),
    ),
    "partial results behind the last one": (
        "decode",
        ("triton_decode", "mine = ((place + before + part)", "mine = ((place + 99 + before + part)"),
    ),
    "a counter behind the last one": (
        "decode",
        ("triton_decode", "tl.atomic_add(counter, 1", "tl.atomic_add(counter + 5, 1"),
    ),
    "members behind the last one": ("cascade", ("triton_cascade", "row // grouped, mask=is_row, other=0)", "row // grouped)")),
    "a slot before the first": ("store", ("triton_store", "if slot >= 0:", "if slot >= -1:")),
    "heads of a token behind the last one": ("store", ("triton_store", "(head < heads)[:, None] &", "(head >= 0)[:, None] &")),
    "a scale behind the last one": ("store_quantised", ("triton_store", "scale, mask=head < heads)", "scale)")),
    "a slot before the first, of keys": ("rope", ("triton_rope", "if slot >= 0:", "if slot >= -1:")),
    "angles behind the last": ("rope", ("triton_rope", "is_turned = d < rotary", "is_turned = d >= 0")),
    "numbers behind a block": ("blocks", ("triton_blocks", "mask = at < size", "mask = at >= 0")),
}


def _in_a_fork(run: Callable[[Kernels, Guard], None], kernels: Kernels, *, at_end: bool) -> int:
    """0 if it came through, else the signal that ended it, negative, or 1."""
    child = os.fork()
    if child == 0:
        faulthandler.disable()
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        status = 1
        try:
            run(kernels, Guard(at_end=at_end))
            status = 0
        finally:
            sys.stderr.flush()
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def _modules(package: ModuleType) -> Kernels:
    start = package.__name__ + "."
    return {name.removeprefix(start): module for name, module in sys.modules.items() if name.startswith(start)}


def main() -> None:
    """All runs without a fault, at both ends; then each fault, at the end that shows it: mostly the last byte."""
    torch.set_num_threads(1)
    interpreter.mend()
    for name, run in RUNS.items():
        status = [_in_a_fork(run, _modules(changed()), at_end=at_end) for at_end in (False, True)]
        print(json.dumps({"run": name, "fault": None, "status": status}), flush=True)
    for fault, (name, change) in FAULTS.items():
        status = [_in_a_fork(RUNS[name], _modules(changed(change)), at_end=True)]
        if status == [0]:
            status.append(_in_a_fork(RUNS[name], _modules(changed(change)), at_end=False))
        print(json.dumps({"run": name, "fault": fault, "status": status}), flush=True)


if __name__ == "__main__":
    main()
