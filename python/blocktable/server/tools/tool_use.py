"""What a request's tools mean for its prompt, its sampling and the reading of its answers.

Before: `chat.py` has the record. After: it asks for text so, and reads it with `reader`. Always: what cannot be kept to is
refused by its field before a prompt is read: tools of an unknown format, a call that is forced beside another shape.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import msgspec

from ..errors import disagree, refused
from ..protocol.chat import ChatRequest, NamedTool, Tool
from ..protocol.structured import TextFormat
from ..serving import Serving
from .call_reader import CallReader
from .forced import ForcedReader, NamedReader
from .formats import FORMATS, format_of
from .grammar import arguments_grammar, list_grammar

MAX_TOOLS_BYTES = 2**18
"""Of all tools of a request, as JSON."""

UNREAD = (
    "the model cannot choose whether it calls: how it writes calls is not known here (--tool-call-parser), or not wanted; "
    "tool_choice none, required, or of a function is served"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolUse:
    """Of one request."""

    tools: Sequence[Tool] | None = None
    """That the prompt shows."""
    sampling: dict[str, Any] = field(default_factory=dict)
    """Arguments of `SamplingParams` beside the request's own."""
    make_reader: Callable[[], CallReader] | None = None
    """None: no call is looked for."""


async def tool_use(serving: Serving, ask: ChatRequest) -> ToolUse:
    """Raises `ApiError` for what is wrong together, or not served with this model."""
    tools, choice = ask.tools, ask.tool_choice
    if not tools:
        if ask.forces_call:
            raise disagree("tool_choice", "forces a call: it goes with tools only")
        return ToolUse()
    _check(tools)
    if choice == "none":
        return ToolUse()
    has_shape = ask.structured_outputs is not None or not isinstance(ask.response_format, TextFormat | None)
    if has_shape:
        raise disagree("tools", "go with structured_outputs, or a response_format but text, where tool_choice is none only")
    kind = await _format(serving)
    at_most = 1 if ask.parallel_tool_calls is False else None
    if ask.forces_call:
        return _forced(tools, choice, at_most, None if kind is None else kind.make_id)
    if kind is None or not serving.has_auto_tool_choice:
        raise refused("tools", UNREAD, "template_refuses")
    names = frozenset(tool.function.name for tool in tools)
    tokenizer = await serving.reader.tokenizer()
    shows = {"skip_special_tokens": False} if any(map(tokenizer.is_special, kind.MARKERS)) else {}
    return ToolUse(tools=tools, sampling=shows, make_reader=partial(kind, names, at_most=at_most))


def _forced(tools: Sequence[Tool], choice: Any, at_most: int | None, new_id: Callable[[], str] | None) -> ToolUse:
    names = [tool.function.name for tool in tools]
    make_reader: Callable[[], CallReader]
    if isinstance(choice, NamedTool):
        name = choice.function.name
        if name not in names:
            raise disagree("tool_choice.function.name", f"{name!r} is none of the tools")
        place = names.index(name)
        grammar = arguments_grammar(tools[place], place)
        make_reader = partial(NamedReader, (name,), new_id=new_id)
    else:
        grammar = list_grammar(tools, is_parallel=at_most is None)
        make_reader = partial(ForcedReader, frozenset(names), new_id=new_id)
    return ToolUse(tools=tools, sampling={"structured_outputs": {"grammar": grammar}}, make_reader=make_reader)


async def _format(serving: Serving) -> type[CallReader] | None:
    name = serving.tool_call_parser or format_of((await serving.reader.tokenizer()).chat_template)
    return None if name is None else FORMATS[name]


def _check(tools: Sequence[Tool]) -> None:
    size = len(msgspec.json.encode(tools))
    if size > MAX_TOOLS_BYTES:
        raise refused("tools", f"must be at most {MAX_TOOLS_BYTES} bytes together, and are {size}")
    seen: set[str] = set()
    for place, tool in enumerate(tools):
        name = tool.function.name
        if name in seen:
            raise disagree(f"tools[{place}].function.name", f"{name!r} is the name of another tool too")
        seen.add(name)
