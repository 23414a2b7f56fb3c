"""JSON read character by character, as far as it has come: objects and strings, exactly as RFC 8259 has them.

Before: `call_reader.py` gives one character after the other. After: what has been read stands in `_sink`. Always: the first
character that cannot stand where it came is found when it comes; of a number or a word, when its end does. What that takes
grows with the text alone, whatever stands in it: what is open is a list, not a call of a function.
"""

from __future__ import annotations

import json
import re
from collections.abc import Generator
from typing import Any, TypeVar

T = TypeVar("T")

Reading = Generator[None, str, T]
"""Is sent the next character at each `yield`."""

SPACE = " \t\n\r"

CLOSING = {"{": "}", "[": "]"}

SCALAR = re.compile(r"true|false|null|-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?")

SCALAR_LETTERS = frozenset("truefalsn0123456789+-.eE")

HEX = frozenset("0123456789abcdefABCDEF")


class BrokenError(Exception):
    """The last character that was read cannot stand there."""


class JsonText:
    """Where a text has come. Made and used by one reader of calls."""

    def __init__(self) -> None:
        self._sink: list[str] = []
        """What is read goes here, the last character too."""
        self._again = ""
        """Characters that are to be read once more, before all that comes."""

    def _next(self) -> Reading[str]:
        if self._again:
            character, self._again = self._again[0], self._again[1:]
        else:
            character = yield
        self._sink.append(character)
        return character

    def _behind_space(self) -> Reading[str]:
        """The first character that is none."""
        while (character := (yield from self._next())) in SPACE:
            pass
        return character

    def _expect(self, text: str) -> Reading[None]:
        """Exactly this."""
        for character in text:
            if (yield from self._next()) != character:
                raise BrokenError

    def _string(self) -> Reading[str]:
        """Behind its quotation mark: what it says."""
        written = []
        while (character := (yield from self._next())) != '"':
            if character < " ":
                raise BrokenError
            written.append(character)
            if character == "\\":
                written.append((yield from self._escaped()))
        said: Any = json.loads(f'"{"".join(written)}"')
        return str(said)

    def _escaped(self) -> Reading[str]:
        kind = yield from self._next()
        if kind not in '"\\/bfnrtu':
            raise BrokenError
        digits = ""
        while kind == "u" and len(digits) < 4:
            digits += yield from self._next()
            if digits[-1] not in HEX:
                raise BrokenError
        return kind + digits

    def _object(self) -> Reading[None]:
        """Behind its `{`, up to its `}`."""
        open_ones, is_empty = ["}"], True
        character = yield from self._behind_space()
        while True:
            if not (is_empty and character == open_ones[-1]):
                if open_ones[-1] == "}":
                    character = yield from self._key(character)
                if character in CLOSING:
                    open_ones.append(CLOSING[character])
                    is_empty = True
                    character = yield from self._behind_space()
                    continue
                character = yield from self._simple(character)
            while character == open_ones[-1]:
                open_ones.pop()
                if not open_ones:
                    return
                character = yield from self._behind_space()
            if character != ",":
                raise BrokenError
            is_empty = False
            character = yield from self._behind_space()

    def _key(self, character: str) -> Reading[str]:
        """From its quotation mark on: the first character of its value."""
        if character != '"':
            raise BrokenError
        yield from self._string()
        if (yield from self._behind_space()) != ":":
            raise BrokenError
        return (yield from self._behind_space())

    def _simple(self, character: str) -> Reading[str]:
        """A string, a number or a word, from its first character on: the first one behind it, and behind white space."""
        if character == '"':
            yield from self._string()
            return (yield from self._behind_space())
        written = []
        while character in SCALAR_LETTERS:
            written.append(character)
            character = yield from self._next()
        if SCALAR.fullmatch("".join(written)) is None:
            raise BrokenError
        return (yield from self._behind_space()) if character in SPACE else character
