"""The numbers of a model served through pages, against its own.

Before: `attachment` has a model that passed `self_check`. After: it may be served. Always: two sequences, packed into one row,
in chunks, then one by one, over shuffled blocks, must give the logits that the model's own eager attention gives for each
sequence alone. So an attention that our bridge misreads is refused when it is loaded, not served wrongly.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ..errors import UnsupportedModelError
from ..kernels.attention_batch import AttentionBatch
from .attention_backend import choose_backend
from .attention_bridge import IMPLEMENTATION, set_implementation
from .forward_context import GroupStep, PagedForward
from .geometry import KVGeometry
from .kv_memory import KVMemory
from .kv_sizing import KVSizing
from .packed_forward import PackedInputs, packed_logits
from .trace import AttentionTrace

BLOCK_SIZE = 4
LENGTHS = (21, 13)
"""Tokens of the two sequences."""
LONGEST_WINDOW = 160
"""A window up to this many tokens is filled by the check; a longer one would make loading slow."""
FLOAT32_ERROR = 2e-3
"""Largest error of a row of logits, relative to its size, in float32 and float64; 4e-6 is the worst seen on a CPU."""
HALF_ERROR = 5e-2
"""Largest median error of the rows in bfloat16 and float16, where two orders of adding differ by about 1e-2."""


@dataclass(frozen=True, slots=True)
class _Sequence:
    tokens: Tensor  # [L] int64
    table: Tensor  # [blocks] int32
    expected: Tensor  # [L, vocab] float32, by the model's own attention


def check_numbers(model: PreTrainedModel, trace: AttentionTrace, geometry: KVGeometry, max_model_len: int, name: str) -> float:
    """Compare the two ways; returns the error found. Raises `UnsupportedModelError` if they differ by more than rounding."""
    device = model.get_input_embeddings().weight.device
    sequences = _prepare(model, trace, max_model_len, device, name)
    blocks = 1 + sum(len(sequence.table) for sequence in sequences)
    sizing = KVSizing(
        num_blocks=blocks,
        block_size=BLOCK_SIZE,
        bytes_per_block=geometry.bytes_per_block(BLOCK_SIZE),
        chosen_by="num_blocks",
        available_bytes=None,
    )
    memory = KVMemory(geometry, sizing, device)
    errors: list[Tensor] = []
    done = [0 for _ in sequences]
    for counts in _steps([len(sequence.tokens) for sequence in sequences]):
        errors += _run_step(model, memory, sequences, done, counts)
    return _judge(torch.cat(errors), geometry.dtype, name)


def _prepare(
    model: PreTrainedModel, trace: AttentionTrace, max_model_len: int, device: torch.device, name: str
) -> list[_Sequence]:
    """The sequences, their scattered blocks, and what the model itself says to them."""
    draw = torch.Generator().manual_seed(0)
    lengths = _lengths(trace, max_model_len)
    needed = [-(-length // BLOCK_SIZE) for length in lengths]
    tables = (torch.randperm(sum(needed), generator=draw) + 1).to(torch.int32).split_with_sizes(needed)
    tokens = [_ordinary_tokens(model, trace.logits_width, length, draw).to(device) for length in lengths]
    set_implementation(model, "eager", name)
    try:
        with torch.inference_mode():
            own = [model(input_ids=row[None], use_cache=False).logits[0].float() for row in tokens]
    finally:
        set_implementation(model, IMPLEMENTATION, name)
    if not all(bool(logits.isfinite().all()) for logits in own):
        raise UnsupportedModelError(name, f"its own logits are not finite in {model.dtype}: broken weights, or an overflow")
    return [_Sequence(*parts) for parts in zip(tokens, tables, own)]


def _lengths(trace: AttentionTrace, max_model_len: int) -> list[int]:
    """Long enough to leave the windows, where these are short."""
    windows = [call.window for call in trace.calls if call.window is not None and call.window <= LONGEST_WINDOW]
    longest = max(LENGTHS[0], max(windows, default=0) + 5)
    return [min(length, max_model_len) for length in (longest, LENGTHS[1])]


def _ordinary_tokens(model: PreTrainedModel, vocab_size: int, count: int, draw: torch.Generator) -> Tensor:
    """[count] ids of the vocabulary that have no special meaning in the configuration (padding, images, ...)."""
    text = model.config.get_text_config(decoder=True)
    named = {**model.config.to_dict(), **text.to_dict()}
    special = {value for key, value in named.items() if key.endswith(("_token_id", "_token_index")) and isinstance(value, int)}
    drawn = torch.randint(vocab_size, (4 * count + 64,), generator=draw).tolist()
    usable = [token for token in drawn if token not in special] or drawn
    return torch.tensor((usable * count)[:count])


def _steps(lengths: list[int]) -> list[list[int]]:
    """Tokens of each sequence a step: a chunk, the rest but one, one."""
    first = [min(8, max(0, length - 1)) for length in lengths]
    second = [length - 1 - chunk for length, chunk in zip(lengths, first)]
    return [first, second, [1 for _ in lengths]]


def _run_step(
    model: PreTrainedModel, memory: KVMemory, sequences: list[_Sequence], done: list[int], counts: list[int]
) -> list[Tensor]:
    """Run `counts` more tokens of each sequence as one packed row; returns the error of every row. Moves `done` on."""
    device = memory.device
    ranges = [torch.arange(start, start + count) for start, count in zip(done, counts)]
    slots = [s.table[at // BLOCK_SIZE].long() * BLOCK_SIZE + at % BLOCK_SIZE for s, at in zip(sequences, ranges)]
    tables = torch.nn.utils.rnn.pad_sequence([s.table for s in sequences], batch_first=True)
    starts = torch.tensor([0, *counts]).cumsum(0)
    ends = torch.tensor([start + count for start, count in zip(done, counts)])
    batch = AttentionBatch.build(tables.to(device), starts, ends.to(device), BLOCK_SIZE)
    inputs = PackedInputs(
        token_ids=torch.cat([s.tokens[at.to(device)] for s, at in zip(sequences, ranges)]),
        positions=torch.cat(ranges).to(device),
        rows=torch.arange(sum(counts), device=device),
        context=PagedForward(
            [GroupStep(batch, torch.cat(slots).to(device))] * len(memory.layers),
            memory.layers,
            choose_backend("auto", device, memory.geometry),
        ),
    )
    logits = packed_logits(model, inputs)
    errors = []
    for sequence, start, count, rows in zip(sequences, done, counts, logits.split_with_sizes(counts)):
        errors.append(_row_errors(rows, sequence.expected[start : start + count]))
    done[:] = ends.tolist()
    return errors


def _row_errors(got: Tensor, expected: Tensor) -> Tensor:
    """[rows] distance relative to the expected row's size, both around their own mean: softmax does not see a shift."""
    got, expected = got - got.mean(-1, keepdim=True), expected - expected.mean(-1, keepdim=True)
    distance: Tensor = torch.linalg.vector_norm(got - expected, dim=-1)
    size: Tensor = torch.linalg.vector_norm(expected, dim=-1)
    return distance / size.clamp_min(1e-12)


def _judge(errors: Tensor, dtype: torch.dtype, name: str) -> float:
    is_half = dtype.itemsize < 4
    found, allowed = (errors.median(), HALF_ERROR) if is_half else (errors.max(), FLOAT32_ERROR)
    if not float(found) <= allowed:  # a NaN must not pass
        raise UnsupportedModelError(
            name,
            f"paged attention does not reproduce its own: logits differ by {float(found):.1e} of their size (at most "
            f"{allowed:.0e} is rounding), so some part of its attention is not understood",
        )
    return float(found)
