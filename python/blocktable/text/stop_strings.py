"""Stop strings: where a text ends, and how much of it can be shown before that is known.

Before: `output_text.py` feeds each new piece of text. After: what can no longer be part of a stop string is released.
Always: released text only grows, and holds no character of the stop string that ends it (unless that is to be shown). The
text ends at the first character that completes a stop string; of several completed by it, the longest counts. That is a
property of the text alone, so it does not matter how it was cut into tokens and chunks.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache


@dataclass(frozen=True, slots=True)
class StopMatch:
    """A stop string was completed."""

    stop: str


class StopAutomaton:
    """Finds any of some strings in one pass over a text (Aho and Corasick, "Efficient string matching", 1975).

    State 0 is "nothing"; a state stands for the longest end of the text that begins a stop string. Shared between requests
    and never changed. For each state: `steps` by character, `fallback`, `found` (the longest stop string that ends there)
    and `open_length` (characters of the longest end of the text that could still become a stop string).
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self.steps: list[dict[str, int]] = [{}]
        self.fallback = [0]
        self.found: list[str | None] = [None]
        self.open_length = [0]
        depth = [0]
        for stop in stops:
            state = 0
            for character in stop:
                if character not in self.steps[state]:
                    self.steps[state][character] = len(self.steps)
                    self.steps.append({})
                    self.fallback.append(0)
                    self.found.append(None)
                    self.open_length.append(0)
                    depth.append(depth[state] + 1)
                state = self.steps[state][character]
            self.found[state] = stop
        self._link(depth)

    def next(self, state: int, character: str) -> int:
        """The state after one more character."""
        while state and character not in self.steps[state]:
            state = self.fallback[state]
        return self.steps[state].get(character, 0)

    def _link(self, depth: list[int]) -> None:
        """Set what follows from shorter states, shortest first: `fallback`, `found`, `open_length`."""
        waiting = deque(self.steps[0].values())
        while waiting:
            state = waiting.popleft()
            shorter = self.fallback[state]
            self.found[state] = self.found[state] or self.found[shorter]
            # A state without steps cannot grow: only its shorter ends can.
            self.open_length[state] = depth[state] if self.steps[state] else self.open_length[shorter]
            for character, child in self.steps[state].items():
                self.fallback[child] = self.next(shorter, character)
                waiting.append(child)


@lru_cache(maxsize=64)
def automaton_of(stops: tuple[str, ...]) -> StopAutomaton:
    """The automaton of these strings; requests that name the same ones share it."""
    return StopAutomaton(stops)


class StopStrings:
    """Watches the text of one request. One thread at a time.

    `match` is None until a stop string has ended the text; from then on nothing is released any more.
    """

    def __init__(self, stops: Sequence[str], *, include_in_output: bool = False) -> None:
        """`stops`: none of them empty. `include_in_output`: the text ends behind the stop string, not before it."""
        self._automaton = automaton_of(tuple(stops)) if stops else None
        self._include = include_in_output
        self._state = 0
        self._held = ""
        self.match: StopMatch | None = None

    def push(self, piece: str, *, may_stop: bool = True) -> str:
        """Take the next piece of text; returns what can be shown now.

        With `may_stop` False a stop string that this piece completes does not count; one that it begins still may.
        """
        if self.match is not None:
            return ""
        if self._automaton is None or not piece:
            return piece
        text = self._held + piece
        for place, character in enumerate(piece, start=len(self._held) + 1):
            self._state = self._automaton.next(self._state, character)
            stop = self._automaton.found[self._state]
            if stop is not None and may_stop:
                self.match = StopMatch(stop)
                self._held = ""
                return text[:place] if self._include else text[: place - len(stop)]
        shown = len(text) if self._include else len(text) - self._automaton.open_length[self._state]
        self._held = text[shown:]
        return text[:shown]

    def finish(self) -> str:
        """The text ends without another stop string: returns what was held back."""
        rest, self._held = self._held, ""
        return rest
