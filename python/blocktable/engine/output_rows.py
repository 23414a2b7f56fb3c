"""The output tokens of the running requests, in flat arrays by row.

Before: `hand_out.py` brings the ids of a step, as one array. After: a request's tokens are read once, when it ends or loses
its row; those with text to stream are read by column as they come. Adding the tokens of a step makes no Python object for
each request. Row r belongs to one request from `open` to `close`, as in the plan's tables.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

FIRST_COLUMNS = 64
"""Outputs that there is room for at first; doubled as often as the longest one asks for it."""


@dataclass(frozen=True, slots=True)
class SavedOutputs:
    """Output tokens of one request, and the clock (ns) at the first and the last of them; 0 while there is none."""

    token_ids: NDArray[np.int32]  # [outputs]
    first_ns: int
    last_ns: int


NO_OUTPUTS = SavedOutputs(np.zeros(0, dtype=np.int32), 0, 0)


class OutputRows:
    """Tokens, their count, and the times of the first and the last one, for each of `num_rows` rows."""

    __slots__ = ("_first_ns", "_last_ns", "_num_outputs", "_token_ids")

    def __init__(self, num_rows: int) -> None:
        self._token_ids = np.zeros((num_rows, FIRST_COLUMNS), dtype=np.int32)
        self._num_outputs = np.zeros(num_rows, dtype=np.int64)
        self._first_ns = np.zeros(num_rows, dtype=np.int64)
        self._last_ns = np.zeros(num_rows, dtype=np.int64)

    def open(self, row: int, saved: SavedOutputs) -> None:
        """`row` gets a request that has `saved` already (`NO_OUTPUTS`, unless it was preempted)."""
        count = len(saved.token_ids)
        self._make_room(count)
        self._token_ids[row, :count] = saved.token_ids
        self._num_outputs[row] = count
        self._first_ns[row] = saved.first_ns
        self._last_ns[row] = saved.last_ns

    def close(self, row: int) -> None:
        """`row` belongs to nobody."""
        self._num_outputs[row] = 0

    def append(self, rows: NDArray[np.integer], ids: NDArray[np.int64], now_ns: int) -> None:
        """One more token for each of `rows` [K]: `ids` [K]. A row may stand there once only."""
        places = self._num_outputs[rows]
        if places.size == 0:
            return
        self._make_room(int(places.max()) + 1)
        self._token_ids[rows, places] = ids
        self._num_outputs[rows] = places + 1
        self._first_ns[rows[places == 0]] = now_ns
        self._last_ns[rows] = now_ns

    def positions(self, rows: NDArray[np.integer]) -> NDArray[np.int64]:
        """[K] outputs that each of `rows` has: the position of its next one."""
        positions: NDArray[np.int64] = self._num_outputs[rows]
        return positions

    def read(self, row: int) -> SavedOutputs:
        """What `row` has, as a copy."""
        tokens = self._token_ids[row, : self._num_outputs[row]].copy()
        return SavedOutputs(tokens, int(self._first_ns[row]), int(self._last_ns[row]))

    def _make_room(self, columns: int) -> None:
        have = self._token_ids.shape[1]
        if columns <= have:
            return
        while have < columns:
            have *= 2
        wider = np.zeros((len(self._token_ids), have), dtype=np.int32)
        wider[:, : self._token_ids.shape[1]] = self._token_ids
        self._token_ids = wider
