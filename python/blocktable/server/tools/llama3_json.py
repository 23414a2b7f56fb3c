"""`{"name": …, "parameters": {…}}` and nothing else, or several behind each other, parted by `;`: Llama 3.1 and later.

`<|python_tag|>` may stand in front. A text that begins otherwise makes no call.
"""

from __future__ import annotations

from typing import ClassVar

from .call_reader import CallReader
from .json_text import BrokenError, Reading

TAG = "<|python_tag|>"


class Llama3JsonReader(CallReader):
    """See above."""

    MARKERS: ClassVar[tuple[str, ...]] = (TAG,)

    def _read(self) -> Reading[None]:
        yield from self._whole(self._all())

    def _all(self) -> Reading[None]:
        first = yield from self._behind_space()
        if first == TAG[0]:
            yield from self._expect(TAG[1:])
            first = yield from self._behind_space()
        while first == "{":
            yield from self._call()
            if (yield from self._behind_space()) != ";":
                raise BrokenError
            first = yield from self._behind_space()
        raise BrokenError
