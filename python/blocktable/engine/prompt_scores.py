"""Log probabilities of the tokens of prompts: what is known of each, and the rows of a step that bring more.

Before: a plan computes a part of a prompt, and `model/packed_forward.py` has the logits of its rows, some at a time. After:
the request's outputs. Always: each token is scored once, by the first step that went well; what is computed again after a
preemption or a failure changes nothing; the logits of a prompt never lie in memory all at once.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray

from ..errors import BlocktableError
from ..sampling.logprobs import HostLogprobs, StepLogprobs, empty
from .token_logprobs import TokenLogprobs

if TYPE_CHECKING:
    from .._core import Plan
    from .live_request import LiveRequest


class NoDistributionError(BlocktableError):
    """The logits behind a token of a prompt hold no distribution: a NaN or +inf among them, or -inf everywhere."""

    def __init__(self, position: int) -> None:
        super().__init__(f"position {position} of the prompt: its logits hold no distribution")
        self.position = position


class PromptScores:
    """Of one prompt: place p is the token behind that of position p, given all up to position p."""

    def __init__(self, token_ids: NDArray[np.int32], num_best: int) -> None:
        count = len(token_ids) - 1
        self.num_best = num_best
        self.targets = token_ids[1:]
        self._told = empty(np.arange(count), num_best)
        self._told.values.fill(np.nan)  # what is not known is no number
        self._is_known = np.zeros(count, dtype=np.bool_)
        self.is_complete = count == 0
        """All are known."""
        self._packed: TokenLogprobs | None = None

    @property
    def packed(self) -> TokenLogprobs | None:
        """All of them; None until they are known."""
        if self._packed is None and self.is_complete:
            told = self._told
            parts = (bytearray(part.tobytes()) for part in (told.ids, told.values, told.ranks))
            self._packed = TokenLogprobs(self.num_best, *parts)
        return self._packed

    def unknown(self, positions: NDArray[np.int32]) -> NDArray[np.intp]:
        """Which of these positions of a step (places in it) would bring something new."""
        inside = np.flatnonzero(positions < len(self._is_known))
        return inside[~self._is_known[positions[inside]]]

    def note(self, positions: NDArray[np.int32], told: StepLogprobs, rows: slice) -> int | None:
        """The `rows` of `told` are of these positions. Returns the first of them whose logits held no distribution."""
        width = 1 + self.num_best
        self._told.ids[positions] = told.ids[rows, :width]
        self._told.values[positions] = told.values[rows, :width]
        self._told.ranks[positions] = told.ranks[rows]
        self._is_known[positions] = True
        self.is_complete = bool(self._is_known.all())
        lost = positions[np.isnan(told.values[rows, 0])]
        return int(lost[0]) if lost.size else None


class PromptRows:
    """The rows of one step that score prompts. Filled in where the model runs, read by the step loop afterwards."""

    def __init__(self, parts: list[tuple[LiveRequest, PromptScores, NDArray[np.int32], NDArray[np.intp]]]) -> None:
        """`parts`: a request, its scores, and its positions and their rows in the step."""
        self._parts = parts
        self.rows = np.concatenate([rows for *_, rows in parts])  # [R] int64
        best = [scores.num_best for _, scores, _, _ in parts]
        self._best = np.repeat(best, [len(rows) for *_, rows in parts]).tolist()
        self._told = empty(np.arange(len(self.rows)), max(best))
        self._told.ids[:, 0] = np.concatenate([scores.targets[positions] for _, scores, positions, _ in parts])

    @classmethod
    def of(cls, plan: Plan, scoring: dict[int, LiveRequest]) -> PromptRows | None:
        """Those of a plan; None if there are none. `scoring`: by row of the plan's tables, whose prompts are to be scored."""
        parts = []
        for place, row in enumerate(plan.seq_slots.tolist()):
            request = scoring.get(row)
            if request is None or request.prompt_scores is None:
                continue
            first, last = plan.query_starts[place : place + 2].tolist()
            positions = plan.positions[first:last]
            new = request.prompt_scores.unknown(positions)
            if new.size:
                parts.append((request, request.prompt_scores, positions[new], first + new))
        return cls(parts) if parts else None

    def take(self, first: int, logits: torch.Tensor) -> None:
        """The logits [r, vocab] float32 of `rows` from `first` on."""
        table = logits.cpu().numpy()
        places = range(first, first + len(table))
        HostLogprobs(table.shape[1]).read(self._told, list(table), places, self._best[first : places.stop])

    def hand_out(self) -> Iterator[tuple[LiveRequest, int]]:
        """The step went well: note all. Yields (request, position) of those whose logits held no distribution."""
        first = 0
        for request, scores, positions, rows in self._parts:
            lost = scores.note(positions, self._told, slice(first, first + len(rows)))
            first += len(rows)
            if lost is not None:
                yield request, lost
