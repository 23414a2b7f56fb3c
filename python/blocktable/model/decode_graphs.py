"""Steps of single queries as captured graphs: one launch in place of every kernel's own.

Before: `runner` has a plan of which every sequence runs one token. After: its logits. Always: a graph belongs to a padded
number of sequences and a bound on their contexts, and reads buffers that every step fills anew; a row that is padding has no
slot and sees nothing, so that it writes nowhere. Graphs are captured when they are first needed; what cannot be captured runs
as before. The graphs of CUDA have not yet run on a GPU.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..kernels.attention_batch import AttentionBatch
from .attention_backend import AttentionBackend
from .forward_context import GroupStep, PagedForward
from .kv_memory import KVMemory
from .loader import LoadedModel
from .packed_forward import PackedInputs, packed_logits

if TYPE_CHECKING:
    from .._core import Plan

_LOGGER = logging.getLogger(__name__)

SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256)
"""Sequences of a graph; larger steps run as they are."""
CONTEXT = 512
"""Contexts of up to so many positions, of up to twice as many, and so on, share a graph."""
NOWHERE = -1
"""The slot of a row that is padding."""
SEES_NOTHING = 0
"""Its length."""

Run = Callable[[], Tensor]


class Graphs(Protocol):
    """Captures what runs on a device."""

    def capture(self, run: Run) -> Run:
        """`run`, which reads and writes the same memory each time, as something that is quicker to call again."""


class CudaGraphs:
    """torch's graphs of CUDA, which share one pool of memory."""

    def __init__(self) -> None:
        self._pool: Any = None

    def capture(self, run: Run) -> Run:
        """Runs it twice first, on a stream of its own, so that everything is compiled and allocated."""
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(2):
                run()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            out = run()
        self._pool = graph.pool()

        def replay() -> Tensor:
            graph.replay()
            return out

        return replay


def graphs_of(device: torch.device) -> Graphs | None:
    """What captures on this device; None: nothing does."""
    return CudaGraphs() if device.type == "cuda" else None


class _Buffers:
    """What all graphs read: S rows, the last of which may be padding."""

    def __init__(self, num_seqs: int, num_groups: int, max_blocks: int, device: torch.device) -> None:
        def zeros(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        self.token_ids = zeros(num_seqs, dtype=torch.int64)
        self.positions = zeros(num_seqs, dtype=torch.int64)
        self.rows = torch.arange(num_seqs, device=device)
        self.slots = zeros(num_groups, num_seqs, dtype=torch.int64)
        self.tables = zeros(num_groups, num_seqs, max_blocks)
        self.starts = torch.arange(num_seqs + 1, dtype=torch.int32, device=device)
        self.lens = zeros(num_seqs)

    def fill(self, plan: Plan, token_ids: NDArray[np.int64], size: int, columns: int) -> None:
        """The plan's arrays in the first rows, and padding up to `size`."""
        count = plan.num_seqs
        _put(self.token_ids, token_ids, size, 0)
        _put(self.positions, plan.positions, size, 0)
        _put(self.lens, plan.seq_lens, size, SEES_NOTHING)
        for group, (tables, slots) in enumerate(zip(plan.block_tables, plan.slot_mapping, strict=True)):
            _put(self.slots[group], slots, size, NOWHERE)
            rows = torch.from_numpy(tables[:, :columns].take(plan.seq_slots, axis=0))
            self.tables[group, :count, :columns].copy_(rows)


def _put(buffer: Tensor, values: NDArray[np.generic], size: int, padding: int) -> None:
    """`values` at the start of `buffer`, then `padding` up to `size`."""
    padded = np.full(size, padding, dtype=np.int64)
    padded[: len(values)] = values
    buffer[:size].copy_(torch.from_numpy(padded))


class DecodeGraphs:
    """The graphs of one model over its KV memory."""

    def __init__(
        self,
        loaded: LoadedModel,
        memory: KVMemory,
        groups: Sequence[int],
        backend: Callable[[], AttentionBackend],
        graphs: Graphs,
        *,
        keeps_rows: bool,
    ) -> None:
        """`groups`: for each layer its group. `backend` makes the kernels of one graph, with memory of their own."""
        self._loaded = loaded
        self._memory = memory
        self._groups = groups
        self._backend = backend
        self._graphs = graphs
        self._keeps_rows = keeps_rows
        self._buffers: _Buffers | None = None
        self._captured: dict[tuple[int, int], Run] = {}
        self._is_refused = False

    def serves(self, plan: Plan) -> bool:
        """Whether the plan is one that graphs are there for."""
        return not self._is_refused and plan.num_tokens == plan.num_seqs <= SIZES[-1]

    def forward(self, plan: Plan, token_ids: NDArray[np.int64]) -> Tensor | None:
        """Logits [K, vocab] float32 of the plan's `sample_rows`; None if its graph cannot be captured."""
        num_groups, max_seqs, max_blocks = plan.block_tables.shape
        if self._buffers is None:
            most = next((size for size in SIZES if size >= max_seqs), SIZES[-1])
            # Not inference tensors, so that they may be filled inside and outside of inference mode.
            with torch.inference_mode(mode=False):
                self._buffers = _Buffers(most, num_groups, max_blocks, self._memory.device)
        size = next(size for size in SIZES if size >= plan.num_seqs)
        parts = -(-int(plan.seq_lens.max()) // CONTEXT)
        columns = min(max_blocks, -(-CONTEXT * (1 << (parts - 1).bit_length()) // self._memory.block_size))
        self._buffers.fill(plan, token_ids, size, columns)
        run = self._captured.get((size, columns))
        if run is None:
            try:
                run = self._graphs.capture(self._pass(self._buffers, size, columns))
            except RuntimeError as error:
                self._is_refused = True
                _LOGGER.warning("decodes run without graphs: this model's forward cannot be captured: %s", error)
                return None
            self._captured[size, columns] = run
        rows = torch.from_numpy(plan.sample_rows.astype(np.int64)).to(self._memory.device)
        return run()[rows]

    def _pass(self, buffers: _Buffers, size: int, columns: int) -> Run:
        """A forward pass of `size` rows that see up to `columns` blocks."""
        backend = self._backend()
        starts, lens = buffers.starts[: size + 1], buffers.lens[:size]
        steps = []
        for tables, slots in zip(buffers.tables, buffers.slots, strict=True):
            batch = AttentionBatch.unread(
                tables[:size, :columns], starts, lens, self._memory.block_size, end_block=self._memory.num_blocks
            )
            steps.append(GroupStep(batch, slots[:size]))
        context = PagedForward([steps[group] for group in self._groups], self._memory.layers, backend)
        inputs = PackedInputs(buffers.token_ids[:size], buffers.positions[:size], buffers.rows[:size], context)
        return lambda: packed_logits(self._loaded.model, inputs, keeps_rows=self._keeps_rows)
