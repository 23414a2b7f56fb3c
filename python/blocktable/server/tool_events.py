"""Server-sent events of a chat that may call tools.

Before: a `Generation` has pieces. After: as of every stream (`sse.py`). Always: an event has all that is new in an answer,
content and parts of calls; the first part of a call has its index, id and name; all events together are the answer of
`tools/answer.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from .engine_client import Piece
from .generation import Generation
from .sse import ChatEvents
from .tools.call_reader import CallPart, CallReader


class ToolEvents(ChatEvents):
    """Of a chat, each of whose answers has a reader of calls."""

    NOTHING = b'"delta":{}'

    def __init__(self, generation: Generation, readers: Sequence[CallReader], *, includes_usage: bool) -> None:
        super().__init__(generation, includes_usage=includes_usage)
        self._readers = readers

    def _said(self, place: int, piece: Piece) -> bytes:
        reader = self._readers[place]
        told = [reader.push(piece.text), *([] if piece.finish_reason is None else [reader.finish()])]
        content = "".join(one.content for one in told)
        calls = [_part(part) for one in told for part in one.calls]
        delta: dict[str, Any] = ({"content": content} if content else {}) | ({"tool_calls": calls} if calls else {})
        return b'"delta":%b' % msgspec.json.encode(delta) if delta else b""

    def _reason(self, place: int, piece: Piece) -> Any:
        return self._readers[place].reason(piece.finish_reason)


def _part(part: CallPart) -> dict[str, Any]:
    if part.name is None:
        return {"index": part.index, "function": {"arguments": part.arguments}}
    function = {"name": part.name, "arguments": part.arguments}
    return {"index": part.index, "id": part.call_id, "type": "function", "function": function}
