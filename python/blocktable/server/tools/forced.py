"""What a text is that its grammar makes a call (`grammar.py`): a list of calls in JSON, or the arguments of one function.

It may be cut off anywhere, as any text, by `max_tokens` or a stop string.
"""

from __future__ import annotations

from .call_reader import CallReader, Told
from .json_text import BrokenError, Reading


class ForcedReader(CallReader):
    """Of calls in a list."""

    def finish(self) -> Told:
        """See `CallReader`. Behind a call stands no content: what is held is of another one that was cut off."""
        if self._num_begun:
            self._held.clear()
        return super().finish()

    def _read(self) -> Reading[None]:
        yield from self._whole(self._all())

    def _all(self) -> Reading[None]:
        if (yield from self._behind_space()) != "[":
            raise BrokenError
        yield from self._calls()


class NamedReader(ForcedReader):
    """Of one call of the one function that is offered."""

    def _all(self) -> Reading[None]:
        if (yield from self._behind_space()) != "{":
            raise BrokenError
        [name] = self._names
        yield from self._arguments(name)
        self._end()
