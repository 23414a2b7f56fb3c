"""Turns a plan into logits.

Before: the scheduler's plan. After: the sampler, which gives every row of the result a token. Always: one forward pass a step,
whatever it mixes of prompts and decodes; the plan's arrays are read before it returns, and not kept.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

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
from .packed_forward import PackedInputs, ScoredRows, packed_logits
from .parcel import packed
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

    def forward(self, plan: Plan, token_ids: NDArray[np.int64] | None = None, scored: ScoredRows | None = None) -> Tensor:
        """Logits [K, vocab] float32 of the plan's `sample_rows`, on the model's device; K = 0 gives [0, vocab]. `scored` is
        given those of its own rows.

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
        if self._graphs is not None:
            if scored is None and self._graphs.serves(plan) and not any(shared):
                logits = self._graphs.forward(plan, token_ids)
                if logits is not None:
                    return logits
            self._graphs.follow(plan)
        inputs = self._inputs(plan, token_ids, shared)
        return packed_logits(self._loaded.model, inputs, keeps_rows=self._keeps_rows, scored=scored)

    def _inputs(self, plan: Plan, token_ids: NDArray[np.int64], shared: list[Shared | None]) -> PackedInputs:
        """The step on the model's device; only the columns that hold visible tokens are taken from the tables.

        All is checked here, on the host, and brought to the device by one copy: nothing waits for the step before.
        """
        device, block_size = self._memory.device, self._memory.block_size
        columns = -(-int(plan.seq_lens.max()) // block_size)
        tables = [table[:, :columns].take(plan.seq_slots, axis=0) for table in plan.block_tables]  # [S, columns] each
        positions, rows = plan.positions.astype(np.int64), plan.sample_rows.astype(np.int64)
        lengths, slots_of = (plan.query_starts.copy(), plan.seq_lens.copy()), plan.slot_mapping.copy()
        host_starts, host_lens = (torch.from_numpy(array) for array in lengths)
        arrays = (token_ids, positions, rows, *lengths, *slots_of, *tables)
        ids, at, scored, starts, lens, *own = packed(arrays, device)
        steps = []
        for group, (slots, table) in enumerate(zip(own[: len(tables)], own[len(tables) :], strict=True)):
            batch = AttentionBatch.build(torch.from_numpy(tables[group]), host_starts, host_lens, block_size, self._scratch)
            if (prefixes := shared[group]) is not None:
                batch = batch.with_prefixes(*prefixes)
            steps.append(GroupStep(batch if device.type == "cpu" else batch.on_device(table, starts, lens), slots))
        context = PagedForward([steps[group] for group in self._groups], self._memory.layers, self._backend)
        return PackedInputs(token_ids=ids, positions=at, rows=scored, context=context)

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
