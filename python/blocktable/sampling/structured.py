"""What shape a request wants its text to have: `StructuredOutputsParams` as the caller wrote it.

Before: `params.py` has it among the options of a request. After: `grammar.py` makes a grammar of it, which says what is wrong
inside. Always: exactly one shape is asked for, and its text is not longer than `MAX_GRAMMAR_BYTES`. Names are those of vLLM's
`StructuredOutputsParams`; what it has beside them is refused by name.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from ..errors import InvalidInputError
from . import checks

MAX_GRAMMAR_BYTES = 65_536
"""Of UTF-8, in a schema, an expression, a grammar, or all choices together."""

MAX_CHOICES = 1_024

SHAPES = ("json", "json_object", "regex", "choice", "grammar")
"""Of these a request has one."""

TOGETHER = ("structured_outputs", "structured_outputs.disable_any_whitespace", "structured_outputs.whitespace_pattern")
"""Fields that an `InvalidInputError` names where options are wrong together only."""

NOT_SERVED: dict[str, object] = {"disable_fallback": False, "disable_additional_properties": False, "structural_tag": None}


@dataclass(frozen=True, init=False)
class StructuredOutputsParams:
    """The text of every answer has this shape, as a whole, if it ends by itself; `max_tokens` may cut it off.

    Raises `UnknownOptionError` for an option that does not exist, and `InvalidInputError` (field, value, bound) for no shape or
    several, and for one that is too long. Whether a grammar is right is found where it meets a model: `InvalidGrammarError`.
    """

    json: str | None
    """A JSON schema, as text; a dict is written out. The text is JSON that the schema allows."""
    json_object: bool
    """Any JSON object."""
    regex: str | None
    """A regular expression in Rust's syntax, without looking around. It stands for the whole text; a class such as that of
    digits holds those of all scripts."""
    choice: tuple[str, ...]
    """One of these texts, at most `MAX_CHOICES`."""
    grammar: str | None
    """A context-free grammar, in Lark's syntax or GBNF."""
    disable_any_whitespace: bool
    """JSON without optional whitespace."""
    whitespace_pattern: str | None
    """A regular expression for the whitespace between the parts of JSON; None = any."""

    def __init__(
        self,
        *,
        json: str | Mapping[str, Any] | None = None,
        json_object: bool | None = None,
        regex: str | None = None,
        choice: list[str] | tuple[str, ...] | None = None,
        grammar: str | None = None,
        disable_any_whitespace: bool = False,
        whitespace_pattern: str | None = None,
        **others: object,
    ) -> None:
        checks.refuse_others(others, (field.name for field in fields(self)), NOT_SERVED, _named(""))
        checked = {
            "json": _schema(json),
            "json_object": checks.flag(_named("json_object"), False if json_object is None else json_object),
            "regex": _text("regex", regex),
            "choice": _choice(choice),
            "grammar": _text("grammar", grammar),
            "disable_any_whitespace": checks.flag(_named("disable_any_whitespace"), disable_any_whitespace),
            "whitespace_pattern": _text("whitespace_pattern", whitespace_pattern),
        }
        for name, value in checked.items():
            object.__setattr__(self, name, value)
        self._check_together()

    @property
    def shape(self) -> str:
        """Which one of `SHAPES` it is."""
        return next(name for name in SHAPES if _is_said(getattr(self, name)))

    def _check_together(self) -> None:
        said = [name for name in SHAPES if _is_said(getattr(self, name))]
        if len(said) != 1:
            raise InvalidInputError("structured_outputs", ", ".join(said), f"must have exactly one of {', '.join(SHAPES)}")
        if said[0] not in ("json", "json_object"):
            for name in ("disable_any_whitespace", "whitespace_pattern"):
                if _is_said(getattr(self, name)):
                    raise InvalidInputError(_named(name), getattr(self, name), "goes with json and json_object only")
        if self.disable_any_whitespace and self.whitespace_pattern is not None:
            raise InvalidInputError(_named("whitespace_pattern"), self.whitespace_pattern, "no whitespace is wanted")


def read_structured(value: Any) -> StructuredOutputsParams | None:
    """The record itself, or one made of a mapping of its options; None stays None."""
    if value is None or isinstance(value, StructuredOutputsParams):
        return value
    if isinstance(value, Mapping) and all(isinstance(name, str) for name in value):
        return StructuredOutputsParams(**value)
    raise InvalidInputError("structured_outputs", value, "must be StructuredOutputsParams, or a mapping of its options")


def _named(name: str) -> str:
    return f"structured_outputs.{name}"


def _is_said(value: Any) -> bool:
    return value is not None and value is not False and value != ()


def _text(name: str, value: Any) -> str | None:
    if value is None:
        return None
    if not isinstance(value, str):
        raise InvalidInputError(_named(name), value, "must be a text")
    size = checks.num_bytes(_named(name), value)
    if not 1 <= size <= MAX_GRAMMAR_BYTES:
        raise InvalidInputError(_named(name), value[:64], f"has {size} bytes: must have 1..{MAX_GRAMMAR_BYTES}")
    return value


def _schema(value: Any) -> str | None:
    if isinstance(value, Mapping):
        try:
            value = json.dumps(value, ensure_ascii=False, allow_nan=False)
        except (TypeError, ValueError, RecursionError) as error:
            raise InvalidInputError(_named("json"), value, f"must be a JSON schema: {error}") from None
    return _text("json", value)


def _choice(value: Any) -> tuple[str, ...]:
    if value is None:
        return ()
    if not isinstance(value, list | tuple):
        raise InvalidInputError(_named("choice"), value, "must be a list of texts")
    if not 1 <= len(value) <= MAX_CHOICES:
        raise InvalidInputError(_named("choice"), f"{len(value)} texts", f"must be 1..{MAX_CHOICES}")
    size = 0
    for place, text in enumerate(value):
        name = f"choice[{place}]"
        if not isinstance(text, str) or not text:
            raise InvalidInputError(_named(name), text, "must be a text of at least one character")
        size += checks.num_bytes(_named(name), text)
    if size > MAX_GRAMMAR_BYTES:
        raise InvalidInputError(_named("choice"), f"{size} bytes", f"must be at most {MAX_GRAMMAR_BYTES} together")
    return tuple(dict.fromkeys(value))
