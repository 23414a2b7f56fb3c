"""Who has which row of the plan's tables, and what goes with it: sampling parameters, outputs so far, text that runs along.

Before: a plan says who got a row and who lost one (`roster.py` applies the losses first). After: the rows of a step are
read as arrays; one by one only where text runs along. Always: what stands in a row is of the one request that has it, and an
empty row holds nothing of the one before.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from .._core import Plan
from ..sampling.sampler import Sampler
from .live_request import LiveRequest
from .output_rows import OutputRows, SavedOutputs
from .prompt_scores import PromptRows


class RunningRows:
    """`num_rows` rows. The sampler's rows are the same ones and are kept here."""

    def __init__(self, num_rows: int, sampler: Sampler) -> None:
        self.outputs = OutputRows(num_rows)
        self._sampler = sampler
        self._requests: list[LiveRequest | None] = [None] * num_rows
        self._is_heard = np.zeros(num_rows, dtype=np.bool_)
        self._scoring: dict[int, LiveRequest] = {}  # by row, of those whose prompts are to be scored

    def enter(self, request: LiveRequest, row: int) -> None:
        """`request` gets `row`, with what it had made before it lost another one."""
        request.row = row
        self._requests[row] = request
        self._is_heard[row] = request.is_heard
        self.outputs.open(row, request.saved)
        history = request.prompt.array, request.saved.token_ids
        self._sampler.set_row(row, request.sampling, request.seed, *history, request.guide)
        if request.prompt_scores is not None and not request.prompt_scores.is_complete:
            self._scoring[row] = request

    def leave(self, request: LiveRequest) -> None:
        """`request` gives its row up, if it has one, and keeps its outputs."""
        row = request.row
        if row is None:
            return
        request.saved = self.outputs.read(row)
        request.row = None
        self._requests[row] = None
        self._is_heard[row] = False
        self._scoring.pop(row, None)
        self.outputs.close(row)
        self._sampler.clear_row(row)

    def to_score(self, plan: Plan) -> PromptRows | None:
        """The rows of a plan that score prompts."""
        return PromptRows.of(plan, self._scoring) if self._scoring else None

    def note_scores(self, scored: PromptRows) -> Iterator[tuple[LiveRequest, int]]:
        """They went well. Yields (request, position) of those whose logits held no distribution."""
        yield from scored.hand_out()
        self._scoring = {
            row: one for row, one in self._scoring.items() if one.prompt_scores and not one.prompt_scores.is_complete
        }

    def take(self, rows: NDArray[np.int32], ids: NDArray[np.int64], now_ns: int) -> None:
        """One more output token, which counts now, for each of `rows` [K]: `ids` [K]. A row may stand there once only."""
        self.outputs.append(rows, ids, now_ns)
        self._sampler.note(rows, ids)

    def at(self, row: int) -> LiveRequest | None:
        """Who has `row`."""
        return self._requests[row]

    def live(self, rows: NDArray[np.int32]) -> Iterator[LiveRequest]:
        """The requests of these rows that have not ended."""
        for row in rows.tolist():
            request = self._requests[row]
            if request is not None and not request.is_ended:
                yield request

    def speaking(self, rows: NDArray[np.int32], ids: NDArray[np.int64]) -> Iterator[tuple[LiveRequest, int]]:
        """(request, its new token) for those of `rows` whose text or grammar runs along."""
        chosen = np.flatnonzero(self._is_heard[rows])
        if not chosen.size:
            return
        for row, token_id in zip(rows[chosen].tolist(), ids[chosen].tolist()):
            request = self._requests[row]
            if request is not None:
                yield request, token_id

    def outputs_of(self, request: LiveRequest) -> SavedOutputs:
        """What `request` has made so far, with a row or without."""
        return request.saved if request.row is None else self.outputs.read(request.row)
