"""Answers on a screen or in a log, one after the other, although all are made at once.

Before: `generate.py` brings pieces in any order. After: standard output. Always: the answer in front is shown as it comes,
those behind it are held and follow whole, so no two answers are ever mixed, on a terminal or in a file.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TextIO


class AnswerPrinter:
    """Prints `headings[i]` and then the pieces of answer i, for i = 0, 1, 2, …"""

    def __init__(self, headings: Sequence[str], out: TextIO) -> None:
        self._headings = headings
        self._out = out
        self._held: list[list[str]] = [[] for _ in headings]
        self._is_finished = [False] * len(headings)
        self._front = 0
        self._start_front()

    def show(self, place: int, piece: str, *, is_last: bool) -> None:
        """Take the next piece of answer `place`."""
        self._is_finished[place] = is_last
        if place != self._front:
            self._held[place].append(piece)
            return
        self._out.write(piece)
        self._out.flush()
        while self._front < len(self._headings) and self._is_finished[self._front]:
            self._out.write("\n\n")
            self._front += 1
            self._start_front()

    def _start_front(self) -> None:
        if self._front == len(self._headings):
            return
        self._out.write(f"{self._headings[self._front]}\n")
        self._out.write("".join(self._held[self._front]))
        self._held[self._front].clear()
        self._out.flush()
