"""`<tool_call>{"name": …, "arguments": {…}}</tool_call>`, anywhere in a text: Hermes, Qwen, and what was made like them."""

from __future__ import annotations

from typing import ClassVar

from .call_reader import CallReader
from .json_text import BrokenError, Reading

OPENING, CLOSING = "<tool_call>", "</tool_call>"


class HermesReader(CallReader):
    """See above. A call may follow another that was not closed."""

    MARKERS: ClassVar[tuple[str, ...]] = (OPENING, CLOSING)

    def _read(self) -> Reading[None]:
        while True:
            yield from self._until(OPENING)
            try:
                yield from self._behind_opening()
            except BrokenError:
                self._give_back()

    def _behind_opening(self) -> Reading[None]:
        is_closed = False
        while not is_closed:
            if (yield from self._behind_space()) != "{":
                raise BrokenError
            yield from self._call()
            if (yield from self._behind_space()) != "<":
                raise BrokenError
            is_closed = (yield from self._next()) == "/"
            if not is_closed:
                self._again = self._sink.pop()
            yield from self._expect(CLOSING[2:] if is_closed else OPENING[1:])
        self._held.clear()
