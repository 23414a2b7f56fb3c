"""Reads the calls that an answer makes, as its text comes: what every format has in common.

Before: `chat.py` and `tool_events.py` push pieces of text. After: they tell content, and parts of calls. Always: what is told
depends on the text alone, not on how it was cut into pieces; nothing is held back but what may become a call. A call is told
from the `{` of its arguments on, when its name is known to be offered. What breaks before that is content as it stands; what
breaks behind it ends the arguments there, and is content from there on.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any, ClassVar

from ...text.stop_strings import automaton_of
from .call_ids import call_id
from .json_text import BrokenError, JsonText, Reading

ARGUMENTS = ("arguments", "parameters")
"""What the arguments are called in a call."""

BESIDE = ("id", "type")
"""What else stands in a call; it is passed over."""


@dataclass(frozen=True, slots=True)
class CallPart:
    """What is new in one call. The first part of each has its id and its name."""

    index: int
    arguments: str
    call_id: str | None = None
    name: str | None = None


@dataclass(frozen=True, slots=True)
class Told:
    """What is new in an answer."""

    content: str
    calls: list[CallPart]


@dataclass(slots=True)
class _Part:
    index: int
    call_id: str | None = None
    name: str | None = None
    arguments: list[str] = field(default_factory=list)

    def told(self) -> CallPart:
        return CallPart(self.index, "".join(self.arguments), self.call_id, self.name)


class CallReader(JsonText, ABC):
    """Of one answer. `push` takes its text piece by piece, `finish` its end; both return what is known since the call before.
    White space around calls is told between texts only."""

    MARKERS: ClassVar[tuple[str, ...]] = ()
    """What may be a special token of the vocabulary, and has to stand in the text."""

    def __init__(self, names: Collection[str], *, at_most: int | None = None, new_id: Callable[[], str] | None = None) -> None:
        """`names`: of the functions that are offered. `at_most`: calls that are told; None = all. `new_id`: other than those of
        the format."""
        super().__init__()
        self._names = names
        self._at_most = at_most
        self._new_id = new_id or self.make_id
        self._held = self._sink
        """Read, and not known to be content: markup, or a part of a call that is not told yet."""
        self._content: list[str] = []
        self._space: list[str] = []
        """White space at the end of the content, in pieces: perhaps a call follows."""
        self._has_said = False
        self._parts: list[_Part] = []
        self._open: _Part | None = None
        """The call that is being read, if it is told."""
        self._num_begun = self._num_ended = 0
        self._wake: str | None = None
        """Where content is read: the character with which a call may begin, empty if none can. None inside of a call."""
        self._course = self._read()
        next(self._course)

    @staticmethod
    def make_id() -> str:
        """Of a call, as the format has them."""
        return call_id()

    def push(self, text: str) -> Told:
        """The next piece."""
        place = 0
        while place < len(text):
            quiet_up_to = self._quiet_up_to(text, place)
            if quiet_up_to > place:
                self._say(text[place:quiet_up_to])
                place = quiet_up_to
            else:
                self._course.send(text[place])
                place += 1
        return self._news()

    def finish(self) -> Told:
        """The text has ended. Nothing is pushed any more."""
        self._say_held(len(self._held))
        if not self._num_begun:
            self._content += self._space
        return self._news()

    def reason(self, finish_reason: Any) -> Any:
        """Why the answer ended, which ended so: `tool_calls` if there were calls, and each came to its end as the text did."""
        has_called = 0 < self._num_begun == self._num_ended
        return "tool_calls" if has_called and finish_reason == "stop" else finish_reason

    def _quiet_up_to(self, text: str, place: int) -> int:
        """Where what is content for sure ends, from this place on."""
        if self._wake is None or self._held:
            return place
        wakes = text.find(self._wake, place) if self._wake else -1
        return len(text) if wakes < 0 else wakes

    @abstractmethod
    def _read(self) -> Reading[None]:
        """The whole text. Never ends."""

    def _until(self, marker: str) -> Reading[None]:
        """Content, until this stands behind it, and is held. Of no marker: for ever."""
        automaton, state = automaton_of((marker,) if marker else ()), 0
        self._wake = marker[:1]
        while True:
            state = automaton.next(state, (yield from self._next()))
            if automaton.found[state] is not None:
                self._wake = None
                return
            self._say_held(len(self._held) - automaton.open_length[state])

    def _calls(self) -> Reading[None]:
        """Calls in a list, behind its `[`, up to its `]`."""
        end = ","
        while end == ",":
            if (yield from self._behind_space()) != "{":
                raise BrokenError
            yield from self._call()
            end = yield from self._behind_space()
        if end != "]":
            raise BrokenError
        self._held.clear()

    def _call(self) -> Reading[None]:
        """A call in JSON, behind its `{`, up to its `}`."""
        seen: set[str] = set()
        name, arguments, is_told, end = "", "", False, ","
        while end == ",":
            what, first = yield from self._member(seen)
            if what == "arguments" and first == "{" and name:
                yield from self._arguments(name)
                is_told = True
            elif what == "arguments" and first == "{":
                begins = len(self._held) - 1
                yield from self._object()
                arguments = "".join(self._held[begins:])
            elif what == "name" and first == '"':
                name = self._offered((yield from self._string()))
                if arguments:
                    self._begin(name, arguments)
                    is_told = True
            elif what in BESIDE and first == '"':
                yield from self._string()
            else:
                raise BrokenError
            end = yield from self._behind_space()
        if end != "}" or not name:
            raise BrokenError
        if not is_told:
            self._begin(name, "{}")
        self._end()

    def _member(self, seen: set[str]) -> Reading[tuple[str, str]]:
        """What a member of a call is, once each, and the first character of its value."""
        if (yield from self._behind_space()) != '"':
            raise BrokenError
        key = yield from self._string()
        what = "arguments" if key in ARGUMENTS else key
        if what in seen or what not in ("name", "arguments", *BESIDE):
            raise BrokenError
        seen.add(what)
        if (yield from self._behind_space()) != ":":
            raise BrokenError
        return what, (yield from self._behind_space())

    def _arguments(self, name: str) -> Reading[None]:
        """Of a call of this function, told as they come, behind their `{`."""
        self._begin(name, "{")
        self._sink = [] if self._open is None else self._open.arguments
        yield from self._object()
        self._sink = self._held

    def _offered(self, name: str) -> str:
        if name not in self._names:
            raise BrokenError
        return name

    def _begin(self, name: str, arguments: str) -> None:
        """A call is one: tell it, and what is known of its arguments."""
        self._held.clear()
        if self._num_begun == self._at_most:
            return
        self._open = _Part(self._num_begun, self._new_id(), name, [arguments])
        self._parts.append(self._open)
        self._num_begun += 1

    def _end(self) -> None:
        """The call is whole."""
        self._held.clear()
        self._num_ended += self._open is not None
        self._open = None

    def _give_back(self) -> None:
        """The last character broke what was read: what is held is content, and it is looked at once more."""
        self._again = self._sink.pop()
        self._sink = self._held
        self._open = None
        self._say_held(len(self._held))

    def _whole(self, calls: Reading[None]) -> Reading[None]:
        """A text that is `calls` from its start on, or content from where it is not."""
        try:
            yield from calls
        except BrokenError:
            self._give_back()
        yield from self._until("")

    def _say_held(self, count: int) -> None:
        """The first of what is held are content."""
        if count:
            self._say("".join(self._held[:count]))
            del self._held[:count]

    def _say(self, text: str) -> None:
        said = text.rstrip()
        if not said:
            self._space.append(text)
            return
        whole = "".join(self._space) + said
        self._space = [text[len(said) :]]
        self._content.append(whole.lstrip() if self._num_begun and not self._has_said else whole)
        self._has_said = True

    def _news(self) -> Told:
        told = Told("".join(self._content), [part.told() for part in self._parts if part.arguments])
        self._content.clear()
        self._parts.clear()
        if self._open is not None:
            is_read = self._sink is self._open.arguments
            self._open = _Part(self._open.index)
            self._parts.append(self._open)
            self._sink = self._open.arguments if is_read else self._sink
        return told
