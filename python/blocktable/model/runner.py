"""Turns a plan into logits.

Before: the scheduler's plan. After: the sampler, which gives every row of the result a token. Always: one forward pass a step,
whatever it mixes of prompts and decodes; the plan's arrays are read before it returns, and not kept.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..errors import InvalidInputError
from ..kernels.attention_batch import AttentionBatch
from ..kernels.scratch import Scratch
from .attention_backend import choose_backend
from .decode_graphs import DecodeGraphs, Graphs
from .forward_context import GroupStep, PagedForward
from .kv_memory import KVMemory
from .loader import LoadedModel
from .packed_forward import PackedInputs, packed_logits
from .trace import takes

if TYPE_CHECKING:
    from .._core import Plan

Shared = tuple[list[int], list[int], list[int]]
"""Groups of sequences as `Plan.prefix_groups` tells them."""


class ModelRunner:
    """A loaded model over its KV memory."""

    def __init__(
        self, loaded: LoadedModel, kv_memory: KVMemory, attention_backend: str = "auto", graphs: Graphs | None = None
    ) -> None:
        """Raises `InvalidInputError` if the memory was laid out for another model, or for a backend that cannot run on it.

        Plans have the memory's groups. With `graphs`, steps of single queries are captured, if the backend's kernels can be.
        """
        if (kv_memory.geometry.layers, kv_memory.geometry.dtype) != (loaded.geometry.layers, loaded.geometry.dtype):
            raise InvalidInputError("kv_memory", kv_memory.geometry, f"must be laid out for this model: {loaded.geometry}")
        self._loaded = loaded
        self._memory = kv_memory
        self._groups = [kv_memory.geometry.group_of(layer) for layer in range(len(kv_memory.layers))]
        self._scratch = Scratch()
        self._backend = choose_backend(attention_backend, kv_memory.device, kv_memory.geometry)
        self._keeps_rows = takes(loaded.model, "logits_to_keep")
        self._graphs: DecodeGraphs | None = None
        if graphs is not None and self._backend.for_graph is not None:
            own = self._backend.for_graph
            self._graphs = DecodeGraphs(loaded, kv_memory, self._groups, own, graphs, keeps_rows=self._keeps_rows)

    def forward(self, plan: Plan, token_ids: NDArray[np.int64] | None = None) -> Tensor:
        """Logits [K, vocab] float32 of the plan's `sample_rows`, on the model's device; K = 0 gives [0, vocab].

        `token_ids` [T], the plan's own where it knows them; needed if `token_sources` says that it does not know all.

        The plan's `copies` are done first. Whatever the model raises goes to the caller, who then fails the step; the model's
        slot is empty again.
        """
        if token_ids is None:
            if plan.token_sources.max(initial=-1) >= 0:
                raise InvalidInputError("token_sources", int(plan.token_sources.max()), "must be -1, or token_ids given")
            token_ids = plan.token_ids.astype(np.int64)
        self._memory.copy_rows(plan.copies)
        shared = self._shared(plan)
        if self._graphs is not None and self._graphs.serves(plan) and not any(shared):
            logits = self._graphs.forward(plan, token_ids)
            if logits is not None:
                return logits
        inputs = PackedInputs(
            token_ids=self._moved(token_ids),
            positions=self._moved(plan.positions.astype(np.int64)),
            rows=self._moved(plan.sample_rows.astype(np.int64)),
            context=self._context(plan, shared),
        )
        return packed_logits(self._loaded.model, inputs, keeps_rows=self._keeps_rows)

    def _context(self, plan: Plan, shared: list[Shared | None]) -> PagedForward:
        """The step as attention sees it; only the columns that hold visible tokens are taken from the tables."""
        block_size = self._memory.block_size
        columns = -(-int(plan.seq_lens.max()) // block_size)
        starts, lens = torch.from_numpy(plan.query_starts.copy()), self._moved(plan.seq_lens.copy())  # starts: read on the CPU
        steps = []
        for group, (tables, slots) in enumerate(zip(plan.block_tables, plan.slot_mapping, strict=True)):
            rows = self._moved(tables[:, :columns].take(plan.seq_slots, axis=0))  # [S, columns]
            batch = AttentionBatch.build(rows, starts, lens, block_size, self._scratch)
            own = shared[group]
            steps.append(GroupStep(batch if own is None else batch.with_prefixes(*own), self._moved(slots.copy())))
        return PagedForward([steps[group] for group in self._groups], self._memory.layers, self._backend)

    def _shared(self, plan: Plan) -> list[Shared | None]:
        """For each group of layers what sequences share, if kernels that read it once read enough less."""
        shared: list[Shared | None] = [None] * len(plan.block_tables)
        rule = self._backend.cascade
        if rule is None or plan.num_tokens > plan.num_seqs:
            return shared
        size, geometry = self._memory.block_size, self._memory.geometry
        least = rule.bytes_instead_of_graph if self._graphs is not None and self._graphs.serves(plan) else rule.bytes
        for group, layers in enumerate(geometry.groups):
            members, starts, blocks = plan.prefix_groups(group=group, min_blocks=-(-rule.positions // size))
            saved_positions = int(((np.diff(starts) - 1) * blocks).sum()) * size
            layer_bytes = max(geometry.layers[layer].elements_per_token for layer in layers.layers) * geometry.dtype.itemsize
            if saved_positions * layer_bytes >= least:
                shared[group] = (members.tolist(), starts.tolist(), blocks.tolist())
        return shared

    def _moved(self, array: NDArray[Any]) -> Tensor:
        """A tensor over `array`, which must be ours (a plan's memory is written again), on the model's device."""
        tensor = torch.from_numpy(array)
        return tensor if self._memory.device.type == "cpu" else tensor.to(self._memory.device, non_blocking=True)
