"""A whole answer with its calls, as the record that a client gets.

Before: `chat.py` has all of a text. After: it is a part of the reply. Always: it is what the same text would be in a stream.
"""

from __future__ import annotations

from ..protocol.chat import Answer, CalledFunction, ToolCall
from .call_reader import CallPart, CallReader


def answer_of(text: str, reader: CallReader) -> Answer:
    """Content is null where there are calls and nothing beside them."""
    told = [reader.push(text), reader.finish()]
    content = "".join(one.content for one in told)
    calls: dict[int, list[CallPart]] = {}
    for part in (part for one in told for part in one.calls):
        calls.setdefault(part.index, []).append(part)
    if not calls:
        return Answer(content=content)
    return Answer(content=content or None, tool_calls=[_call(parts) for parts in calls.values()])


def _call(parts: list[CallPart]) -> ToolCall:
    first = parts[0]
    arguments = "".join(part.arguments for part in parts)
    return ToolCall(id=first.call_id or "", function=CalledFunction(name=first.name or "", arguments=arguments))
