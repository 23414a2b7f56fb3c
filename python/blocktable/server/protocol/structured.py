"""The shape that a text must have, as OpenAI says it (`response_format`) and as vLLM does (`structured_outputs`).

Before: `generation.py` has both among its fields. After: one of them becomes `SamplingParams.structured_outputs`. Always: what
could be read is one of the shapes that the engine knows; whether a schema or an expression is right, the engine says.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

import msgspec
from msgspec import Meta

from ...sampling.structured import MAX_CHOICES, MAX_GRAMMAR_BYTES
from .not_served import NotServed, Off

Text = Annotated[str, Meta(min_length=1, max_length=MAX_GRAMMAR_BYTES)]
Schema = dict[str, Any]


class StructuredOutputs(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, omit_defaults=True):
    """vLLM's: exactly one of `json`, `json_object`, `regex`, `choice`, `grammar`."""

    OFF: ClassVar[Off] = {
        "disable_additional_properties": (False,),
        "disable_fallback": (False,),
        "structural_tag": (),
    }

    json: Schema | Text | None = None
    """A JSON schema, also as text."""
    json_object: bool | None = None
    """Any JSON object."""
    regex: Text | None = None
    """A regular expression in Rust's syntax, for the whole text."""
    choice: Annotated[list[Text], Meta(min_length=1, max_length=MAX_CHOICES)] | None = None
    """One of these texts."""
    grammar: Text | None = None
    """A context-free grammar in Lark's syntax, or in GBNF."""
    disable_any_whitespace: bool | None = None
    whitespace_pattern: Text | None = None
    disable_additional_properties: NotServed = None
    disable_fallback: NotServed = None
    structural_tag: NotServed = None

    def options(self) -> dict[str, Any]:
        """Arguments of `StructuredOutputsParams`."""
        said = {name: getattr(self, name) for name in self.__struct_fields__ if name not in self.OFF}
        said["json"] = _written(self.json)
        return {name: value for name, value in said.items() if value is not None}


class JsonSchema(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, omit_defaults=True):
    """A schema with a name."""

    name: Annotated[str, Meta(min_length=1, max_length=64)]
    description: str | None = None
    schema: Schema | None = None
    """Left out: any JSON."""
    strict: bool | None = None
    """The schema is always kept to."""


class TextFormat(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="type", tag="text"):
    """Any text."""

    def options(self) -> None:
        """No shape."""


class JsonObjectFormat(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="type", tag="json_object"):
    """Any JSON object."""

    def options(self) -> dict[str, Any]:
        """Arguments of `StructuredOutputsParams`."""
        return {"json_object": True}


class JsonSchemaFormat(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="type", tag="json_schema"):
    """JSON that a schema allows."""

    json_schema: JsonSchema

    def options(self) -> dict[str, Any]:
        """Arguments of `StructuredOutputsParams`."""
        return {"json": _written(self.json_schema.schema or {})}


ResponseFormat = TextFormat | JsonObjectFormat | JsonSchemaFormat


def _written(schema: Schema | str | None) -> str | None:
    """A schema as text, which goes through every door as it is."""
    return msgspec.json.encode(schema).decode() if isinstance(schema, dict) else schema
