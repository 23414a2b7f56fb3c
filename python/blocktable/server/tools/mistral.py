"""`[TOOL_CALLS]`, and behind it a list of calls in JSON, or a function's name and its arguments: Mistral.

The list is that of tokenizers before version 11. Later ones write `[TOOL_CALLS]name{…}`, a marker for each call, with `[ARGS]`
in front of the arguments or not, and in front of that perhaps `[CALL_ID]…`.
"""

from __future__ import annotations

from typing import ClassVar

from .call_ids import ALPHANUMERIC, nine_letters
from .call_reader import CallReader
from .json_text import SPACE, BrokenError, Reading

CALLS, CALL_ID, ARGS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"

NAME = frozenset(ALPHANUMERIC + "_-")


class MistralReader(CallReader):
    """See above."""

    MARKERS: ClassVar[tuple[str, ...]] = (CALLS, CALL_ID, ARGS)

    @staticmethod
    def make_id() -> str:
        """See `nine_letters`."""
        return nine_letters()

    def _read(self) -> Reading[None]:
        while True:
            yield from self._until(CALLS)
            try:
                first = yield from self._behind_space()
                yield from self._calls() if first == "[" else self._named_call(first)
            except BrokenError:
                self._give_back()

    def _named_call(self, first: str) -> Reading[None]:
        name, behind = yield from self._word(first)
        self._offered(name)
        if behind == "[":
            mark = yield from self._next()
            if mark == CALL_ID[1]:
                yield from self._expect(CALL_ID[2:])
                _, behind = yield from self._word((yield from self._behind_space()))
                if behind != "[":
                    raise BrokenError
                mark = yield from self._next()
            if mark != ARGS[1]:
                raise BrokenError
            yield from self._expect(ARGS[2:])
            behind = yield from self._behind_space()
        if behind != "{":
            raise BrokenError
        yield from self._arguments(name)
        self._end()

    def _word(self, first: str) -> Reading[tuple[str, str]]:
        """Letters that a name may have, from the first on, and what comes behind them and white space."""
        letters = []
        while first in NAME:
            letters.append(first)
            first = yield from self._next()
        return "".join(letters), ((yield from self._behind_space()) if first in SPACE else first)
