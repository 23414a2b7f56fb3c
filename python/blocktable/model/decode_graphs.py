"""Steps of single queries as captured graphs: one launch in place of every kernel's own.

Before: `runner` has a plan of which every sequence runs one token. After: its logits. Always: a graph belongs to a padded
number of sequences and a bound on their contexts, and reads memory that every step fills anew, by one copy; a row that is
padding has no slot and sees nothing, so that it writes nowhere. Graphs are captured when they are first needed; what cannot be
captured runs as before. The graphs of CUDA have not yet run on a GPU.
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
from ..kernels.context_parts import PART
from .attention_backend import AttentionBackend
from .device_tables import DeviceTables
from .forward_context import GroupStep, PagedForward
from .kv_memory import KVMemory
from .loader import LoadedModel
from .packed_forward import PackedInputs, packed_logits
from .parcel import Parcel, packed

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

        def replay(_kept: Run = run) -> Tensor:
            # `run` lives as long as this: the graph reads and writes the memory of what it refers to.
            graph.replay()
            return out

        return replay


def graphs_of(device: torch.device) -> Graphs | None:
    """What captures on this device; None: nothing does."""
    return CudaGraphs() if device.type == "cuda" else None


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
        """`groups`: for each layer its group. `backend` makes the kernels of one pass, with memory of their own."""
        self._loaded = loaded
        self._memory = memory
        self._groups = groups
        self._backend = backend
        self._graphs = graphs
        self._keeps_rows = keeps_rows
        self._tables: DeviceTables | None = None
        self._steps: dict[tuple[int, int], _Step] = {}
        self._is_refused = False

    def serves(self, plan: Plan) -> bool:
        """Whether the plan is one that graphs are there for."""
        if self._is_refused or not plan.num_tokens == plan.num_seqs <= SIZES[-1]:
            return False
        # Sequences that share blocks may see more positions than the pool has.
        return int(np.sum((plan.seq_lens + (PART - 1)) // PART)) <= self._most_parts(plan.num_seqs)

    def follow(self, plan: Plan) -> None:
        """See that the next step's tables are right after a plan that is run without a graph."""
        if self._tables is not None:
            self._tables.follow(plan)

    def forward(self, plan: Plan, token_ids: NDArray[np.int64]) -> Tensor | None:
        """Logits [K, vocab] float32 of the plan's `sample_rows`; None if its graph cannot be captured.

        Graphs write their logits to the same place again.
        """
        if self._tables is None:
            self._tables = DeviceTables(plan.block_tables.shape, self._memory.device)
        size = next(size for size in SIZES if size >= plan.num_seqs)
        parts = -(-int(plan.seq_lens.max()) // CONTEXT)
        columns = min(plan.block_tables.shape[2], -(-CONTEXT * (1 << (parts - 1).bit_length()) // self._memory.block_size))
        step = self._steps.get((size, columns))
        is_new = step is None
        if step is None:
            step = _Step(size, len(plan.block_tables), self._memory.device)
        step.fill(plan, token_ids, self._tables)
        if is_new:
            try:
                step.run = self._graphs.capture(self._pass(step, self._tables, size, columns))
            except RuntimeError as error:
                self._is_refused, self._tables, self._steps = True, None, {}
                _LOGGER.warning("decodes run without graphs: this model's forward cannot be captured: %s", error)
                return None
            self._steps[size, columns] = step
        logits = step.run()
        self._tables.has_followed(plan)
        if len(plan.sample_rows) == plan.num_seqs and np.array_equal(plan.sample_rows, np.arange(plan.num_seqs)):
            return logits[: plan.num_seqs]
        return logits[packed([plan.sample_rows.astype(np.int64)], self._memory.device)[0]]

    def _most_parts(self, size: int) -> int:
        """Of all contexts of a step together: those of a full pool, and a begun one for each sequence."""
        return size + self._memory.num_blocks * self._memory.block_size // PART

    def _pass(self, step: _Step, tables: DeviceTables, size: int, columns: int) -> Run:
        """A forward pass of `size` rows that see up to `columns` blocks."""
        memory, model = self._memory, self._loaded.model
        token_ids, positions, slots, lens, seq_slots, places, blocks = step.parcel.device
        starts = torch.arange(size + 1, dtype=torch.int32, device=memory.device)
        every_row = torch.arange(size, device=memory.device)

        def run() -> Tensor:
            # What its kernels keep between layers goes back to the pool of all graphs behind the last one.
            backend = self._backend()
            # Into the tables first: rows are taken out of them next.
            tables.flat.index_copy_(0, places, blocks)
            steps = []
            for group, own in enumerate(slots):
                rows = tables.tables[group, :, :columns].index_select(0, seq_slots)
                # Made anew each time: what a batch derives from lengths must be derived again by each replay.
                batch = AttentionBatch.unread(
                    rows, starts, lens, memory.block_size, end_block=memory.num_blocks, most_parts=self._most_parts(size)
                )
                steps.append(GroupStep(batch, own))
            context = PagedForward([steps[group] for group in self._groups], memory.layers, backend)
            inputs = PackedInputs(token_ids, positions, every_row, context)
            return packed_logits(model, inputs, keeps_rows=self._keeps_rows)

        return run


class _Step:
    """What one graph reads, and the graph."""

    run: Run

    def __init__(self, size: int, num_groups: int, device: torch.device) -> None:
        wide, narrow = np.int64, np.int32
        own = ((size,), wide), ((size,), wide), ((num_groups, size), wide), ((size,), narrow), ((size,), narrow)
        self.parcel = Parcel([*own, ((size,), wide), ((size,), narrow)], device)

    def fill(self, plan: Plan, token_ids: NDArray[np.int64], tables: DeviceTables) -> None:
        """The plan's arrays in the first rows, padding behind them, and what changed in the tables."""
        places, blocks = tables.changes(plan)
        to_ids, to_positions, to_slots, to_lens, to_seq_slots, to_places, to_blocks = self.parcel.open()
        if len(places) > len(to_places):
            tables.write((places, blocks))
            places, blocks = places[:0], blocks[:0]
        _put(to_ids, token_ids, 0)
        _put(to_positions, plan.positions, 0)
        _put(to_lens, plan.seq_lens, SEES_NOTHING)
        _put(to_seq_slots, plan.seq_slots, 0)
        for own, slots in zip(to_slots, plan.slot_mapping, strict=True):
            _put(own, slots, NOWHERE)
        _put(to_places, places, tables.nowhere)
        _put(to_blocks, blocks, 0)
        self.parcel.send()


def _put(row: NDArray[Any], values: NDArray[Any], padding: int) -> None:
    """`values` at the start of `row`, then `padding`."""
    row[: len(values)] = values
    row[len(values) :] = padding
