"""Writes a shape as the grammar that llguidance reads, and what it says of a grammar as a client may read it.

Before: `grammar.py` has a `StructuredOutputsParams`. After: it compiles the text that comes from here. Always: what is refused
here costs no more than its length; an error shows what its client wrote, and nothing of the inside.
"""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING

from ..errors import InvalidGrammarError, InvalidInputError
from .structured import StructuredOutputsParams

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions

MAX_GBNF_BYTES = 8_192
"""Of a grammar in GBNF: it is rewritten by a program in Python, which lets no other thread run."""

LARK = re.compile(r"(?m)^[^\S\n]*(%llguidance\b|start\s*:)")
"""What a grammar in Lark's syntax has. The same as llguidance's own question, which took 50 s for 64 KiB of empty lines, and
let no other thread run meanwhile."""

NO_FORCING = '%llguidance {"no_forcing": true}'

IN_JSON = "at 1(8): failed to compile JSON schema: "

OURS = re.compile(
    r"^\s*[0-9]+ \| (%llguidance \{\"no_forcing|start: (%json|\"\[\" tool_call)|tool_(call|arguments))|^\s*\^\s*$"
)
"""Lines of an error message that show what is written here, or by the server for calls of tools, and not by the client."""

ANY_OBJECT = '{"type": "object"}'


def lark_of(params: StructuredOutputsParams) -> str:
    """The grammar as llguidance reads it. Raises `InvalidGrammarError`."""
    from llguidance import LLMatcher, gbnf_to_lark

    if params.json is not None or params.json_object:
        schema = ANY_OBJECT if params.json is None else params.json
        whitespace: JsonCompileOptions = {}
        if params.disable_any_whitespace:
            whitespace["whitespace_flexible"] = False
        if params.whitespace_pattern is not None:
            whitespace["whitespace_pattern"] = params.whitespace_pattern
        try:
            # Not an empty one: a schema that is true or false takes none.
            made = LLMatcher.grammar_from_json_schema(schema, overrides=whitespace or None)
        except ValueError as error:
            raise invalid(params, told(str(error))) from None
        try:
            return _free(f"start: %json {json.dumps(json.loads(made)['grammars'][0]['json_schema'])}")
        except (ValueError, RecursionError):
            return made  # which is refused, with the reason
    if params.regex is not None:
        return _free(json.loads(LLMatcher.grammar_from_regex(params.regex))["grammars"][0]["lark_grammar"])
    if params.choice:
        return _free("start: " + " | ".join(map(json.dumps, params.choice)))
    text = params.grammar or ""
    if LARK.search(text) is None:
        if len(text.encode()) > MAX_GBNF_BYTES:
            raise invalid(params, f"must be at most {MAX_GBNF_BYTES} bytes in GBNF; in Lark's syntax, more")
        try:
            text = gbnf_to_lark.gbnf_to_lark(text)
        except Exception as error:  # noqa: BLE001 - its reader raises bare ones, and whatever its regular expressions meet
            raise invalid(params, f"is neither Lark's syntax nor GBNF: {told(str(error))}") from None
    return _free(text)


def _free(lark: str) -> str:
    """The same grammar, whose texts may be cut into any tokens. Else a text that nothing else can follow is cut by the
    tokenizer, which takes what is spelled like a special token for one."""
    return f"{lark}\n{NO_FORCING}\n"


def invalid(params: StructuredOutputsParams, why: str) -> InvalidInputError:
    """The refusal of that shape."""
    shape = params.shape
    return InvalidGrammarError(f"structured_outputs.{shape}", getattr(params, shape), why)


def told(text: str) -> str:
    """What a client is told: one line of at most 200 characters, of what the client wrote."""
    text = text.replace("<non-verbose/>", "").replace(IN_JSON, "").partition("<backtrace>")[0]
    lines = [line for line in text.splitlines() if OURS.search(line) is None]
    return " ".join(" ".join(lines).split())[:200]
