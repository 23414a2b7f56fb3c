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
from .forward_context import GroupStep, PagedForward
from .kv_memory import KVMemory
from .loader import LoadedModel
from .packed_forward import PackedInputs, packed_logits
from .trace import takes

if TYPE_CHECKING:
    from .._core import Plan


class ModelRunner:
    """A loaded model over its KV memory."""

    def __init__(self, loaded: LoadedModel, kv_memory: KVMemory, attention_backend: str = "auto") -> None:
        """Raises `InvalidInputError` if the memory was laid out for another model, or for a backend that cannot run on it.

        Plans have the memory's groups.
        """
        if (kv_memory.geometry.layers, kv_memory.geometry.dtype) != (loaded.geometry.layers, loaded.geometry.dtype):
            raise InvalidInputError("kv_memory", kv_memory.geometry, f"must be laid out for this model: {loaded.geometry}")
        self._loaded = loaded
        self._memory = kv_memory
        self._groups = [kv_memory.geometry.group_of(layer) for layer in range(len(kv_memory.layers))]
        self._scratch = Scratch()
        self._backend = choose_backend(attention_backend, kv_memory.device, kv_memory.geometry)
        self._keeps_rows = takes(loaded.model, "logits_to_keep")

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
        inputs = PackedInputs(
            token_ids=self._moved(token_ids),
            positions=self._moved(plan.positions.astype(np.int64)),
            rows=self._moved(plan.sample_rows.astype(np.int64)),
            context=self._context(plan),
        )
        return packed_logits(self._loaded.model, inputs, keeps_rows=self._keeps_rows)

    def _context(self, plan: Plan) -> PagedForward:
        """The step as attention sees it; only the columns that hold visible tokens are taken from the tables."""
        block_size = self._memory.block_size
        columns = -(-int(plan.seq_lens.max()) // block_size)
        starts, lens = torch.from_numpy(plan.query_starts.copy()), self._moved(plan.seq_lens.copy())  # starts: read on the CPU
        steps = []
        for group, (tables, slots) in enumerate(zip(plan.block_tables, plan.slot_mapping, strict=True)):
            rows = self._moved(tables[:, :columns].take(plan.seq_slots, axis=0))  # [S, columns]
            batch = AttentionBatch.build(rows, starts, lens, block_size, self._scratch)
            steps.append(GroupStep(self._with_prefixes(batch, plan, group), self._moved(slots.copy())))
        return PagedForward([steps[group] for group in self._groups], self._memory.layers, self._backend)

    def _with_prefixes(self, batch: AttentionBatch, plan: Plan, group: int) -> AttentionBatch:
        """With what sequences share, for kernels that read it once."""
        if not self._backend.shared_positions or batch.has_chunks:
            return batch
        min_blocks = -(-self._backend.shared_positions // self._memory.block_size)
        members, starts, blocks = (array.tolist() for array in plan.prefix_groups(group=group, min_blocks=min_blocks))
        return batch.with_prefixes(members, starts, blocks) if blocks else batch

    def _moved(self, array: NDArray[Any]) -> Tensor:
        """A tensor over `array`, which must be ours (a plan's memory is written again), on the model's device."""
        tensor = torch.from_numpy(array)
        return tensor if self._memory.device.type == "cpu" else tensor.to(self._memory.device, non_blocking=True)
