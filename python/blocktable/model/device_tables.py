"""The plan's block tables on a device, kept up to date by what each plan says has changed.

Before: a plan, of which `decode_graphs` runs a captured step, or the runner another one. After: captured steps read their rows.
Always: plans are followed in their order, each at most once; after a plan that was not followed (its step had nothing to run,
or failed before it began) all rows are brought anew.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from .parcel import packed

if TYPE_CHECKING:
    from .._core import Plan

Changes = tuple[NDArray[np.int64], NDArray[np.int32]]
"""Places [n] in `flat`, each once, and the block ids that stand there now."""


class DeviceTables:
    """Tables [G, max_num_seqs, max_blocks] int32 on a device."""

    def __init__(self, shape: tuple[int, int, int], device: torch.device) -> None:
        size = shape[0] * shape[1] * shape[2]
        with torch.inference_mode(mode=False):  # so that it may be written inside and outside of inference mode
            self.flat: Tensor = torch.zeros(size + 1, dtype=torch.int32, device=device)
        """All entries, and one that nobody reads."""
        self.tables: Tensor = self.flat[:size].view(shape)
        self._shape = shape
        self._step: int | None = None

    @property
    def nowhere(self) -> int:
        """The place in `flat` that nobody reads."""
        return len(self.flat) - 1

    def follow(self, plan: Plan) -> None:
        """Be what the plan's tables are."""
        self.write(self.changes(plan))
        self.has_followed(plan)

    def changes(self, plan: Plan) -> Changes:
        """What is to be written to be what the plan's tables are. The caller writes it, and then says `has_followed`."""
        is_next = self._step is not None and plan.step == self._step + 1
        self._step = None
        if is_next:
            return _flattened(plan.dirty, plan.dirty_ids, self._shape)
        self.tables.copy_(packed([plan.block_tables.copy()], self.tables.device)[0])
        return np.empty(0, np.int64), np.empty(0, np.int32)

    def has_followed(self, plan: Plan) -> None:
        """All that the plan changed is written, or launched."""
        self._step = plan.step

    def write(self, changes: Changes) -> None:
        """Write changes that no captured step writes."""
        if len(changes[0]):
            self.flat.index_copy_(0, *packed(changes, self.flat.device))


def _flattened(dirty: NDArray[np.int32], ids: NDArray[np.int32], shape: tuple[int, int, int]) -> Changes:
    """Runs [D, 4] (group, row, first column, count) and their values one by one; of several for one place the last counts."""
    group, row, first, count = dirty.T.astype(np.int64)
    begins = (group * shape[1] + row) * shape[2] + first
    places = np.repeat(begins - (count.cumsum() - count), count) + np.arange(len(ids))
    order = places.argsort(kind="stable")
    places = places[order]
    is_last = np.ones(len(places), dtype=np.bool_)
    np.not_equal(places[1:], places[:-1], out=is_last[:-1])
    return places[is_last], ids[order[is_last]]
