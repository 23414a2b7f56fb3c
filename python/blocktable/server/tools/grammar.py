"""The grammar of a text that has to call: a list of calls of any function that is offered, or the arguments of one.

Before: `tool_use.py` has a request that forces a call. After: `sampling/grammar.py` compiles it; `forced.py` reads the text.
Always: arguments keep to their function's schema, `strict` or not; white space in them is one space at most.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from ...sampling.structured import MAX_GRAMMAR_BYTES
from ..errors import refused
from ..protocol.chat import Tool

SPACE = {"x-guidance": {"whitespace_pattern": " ?"}}
"""More of it says nothing, and a model may go on with it until the end."""

NO_PARAMETERS = {"properties": {}, "additionalProperties": False}


def list_grammar(tools: Sequence[Tool], *, is_parallel: bool) -> str:
    """In Lark's syntax, of a list with one call at least, and at most if it is not parallel. Raises `ApiError`."""
    calls = " | ".join(f"tool_call_{place}" for place in range(len(tools)))
    more = '(", " tool_call)*' if is_parallel else ""
    lines = [f'start: "[" tool_call {more} "]"', f"tool_call: {calls}"]
    for place, tool in enumerate(tools):
        begins = f'{{"name": {_written(tool.function.name)}, "arguments": '
        lines.append(f'tool_call_{place}: {_written(begins)} tool_arguments_{place} "}}"')
        lines.append(f"tool_arguments_{place}: {_arguments(tool, place)}")
    return _bounded(lines)


def arguments_grammar(tool: Tool, place: int) -> str:
    """In Lark's syntax, of the arguments of one function. Raises `ApiError`."""
    return _bounded([f"start: {_arguments(tool, place)}"])


def _arguments(tool: Tool, place: int) -> str:
    schema: dict[str, Any] = NO_PARAMETERS if tool.function.parameters is None else tool.function.parameters
    if schema.get("type", "object") != "object":
        raise refused(f"tools[{place}].function.parameters.type", "must be object where a call is forced", "invalid_grammar")
    return f"%json {_written(schema | {'type': 'object'} | SPACE)}"


def _bounded(lines: list[str]) -> str:
    grammar = "\n".join(lines)
    size = len(grammar.encode())
    if size > MAX_GRAMMAR_BYTES:
        bound = f"must be at most {MAX_GRAMMAR_BYTES} bytes together where a call is forced, and are some {size}"
        raise refused("tools", bound, "invalid_grammar")
    return grammar


def _written(value: Any) -> str:
    return msgspec.json.encode(value).decode()
