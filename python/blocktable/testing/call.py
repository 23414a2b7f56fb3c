"""One call on an allocator, as a record that can be told, played again, and made smaller.

Before: a `Watch` that takes them down. After: the same call on another watch. A call that means nothing there, since its
sequence does not live, is passed over, so that any part of a list of calls can be played.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .watch import Watch


@dataclass(frozen=True, slots=True)
class Call:
    """`verb` is the name of a method of `Watch`; `number` is the child of a fork, or the length of a cut."""

    verb: str
    name: int = 0
    tokens: tuple[int, ...] = ()
    number: int = 0

    def on(self, watch: "Watch") -> None:
        """Make this call, if it can be made."""
        live = watch.tokens
        match self.verb:
            case "match" if self.name not in live and self.tokens:
                watch.match(self.name, self.tokens)
            case "append" if self.name in live:
                watch.append(self.name, self.tokens)
            case "publish" if self.name in live:
                watch.publish(self.name)
            case "fork" if self.name in live and self.number not in live:
                watch.fork(self.name, self.number)
            case "truncate" if self.name in live and self.number <= len(live[self.name]):
                watch.truncate(self.name, self.number)
            case "release" if self.name in live:
                watch.release(self.name)
            case "forget":
                watch.forget()

    def smaller(self) -> Iterator["Call"]:
        """The same call with less in it."""
        count = len(self.tokens)
        for kept in {count // 2, count - 1} if count else ():
            yield replace(self, tokens=self.tokens[:kept])
            yield replace(self, tokens=self.tokens[count - kept :])
        if any(self.tokens):
            yield replace(self, tokens=(0,) * count)
        if self.verb == "truncate" and self.number:
            yield replace(self, number=self.number // 2)
            yield replace(self, number=self.number - 1)

    def halved(self) -> "Call":
        """The same call for blocks of half the size."""
        return replace(self, tokens=self.tokens[::2], number=self.number // 2 if self.verb == "truncate" else self.number)

    def __str__(self) -> str:
        match self.verb:
            case "match" | "append":
                return f"{self.verb}({self.name}, {list(self.tokens)})"
            case "fork" | "truncate":
                return f"{self.verb}({self.name}, {self.number})"
            case "forget":
                return "forget()"
            case _:
                return f"{self.verb}({self.name})"
