"""Makes a record of a body, or says which field of it is wrong and why.

Before: `endpoint.py` has the bytes. After: the routes have a record whose every value is inside its bounds. Always: a body of
any bytes is read or refused; the refusal names the field as a client would, `messages[0].role`. What that takes in time and
memory grows with the body's bytes, whatever stands in them.
"""

from __future__ import annotations

import re
from difflib import get_close_matches
from typing import Any, TypeVar

import msgspec

from ..errors import ApiError, refused
from .not_served import refuse_not_served

T = TypeVar("T")

MOST_STRUCTURES = 2**16
"""Lists and objects of a body. One of two bytes takes sixty and more in memory, and the decoder, which lets no other thread run
meanwhile, 0.4 us: 16 MiB of them held up everybody for seconds."""

MOST_LEVELS = 400
"""Lists and objects inside each other. Python's own limit is for the stack of a thread, and differs from one to the next: what
one of them decodes another could not encode."""

_STRING = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"?', re.DOTALL)
"""A string of JSON. One that does not end is one too: whatever the bytes are, each is looked at once."""

_NO_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))
_AS_LISTS = bytes.maketrans(b"{}", b"[]")

_PLACE = re.compile(r" - at (?:`key` in )?`\$\.?(?P<path>[^`]*)`$")
_UNKNOWN = re.compile(r"Object contains unknown field `(?P<field>.*)`$", re.DOTALL)
_MISSING = re.compile(r"Object missing required field `(?P<field>.*)`$")


def read(body: bytes, kind: type[T]) -> T:
    """The record of `kind` in `body`. Raises `ApiError`, or `InvalidInputError` for a feature that is not served yet."""
    _check_structures(body)
    try:
        record = _decode(body, kind)
    except msgspec.ValidationError as error:
        raise _refusal(str(error), kind) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ApiError(400, f"the body is not JSON: {error}", code="invalid_json") from None
    except RecursionError:
        raise _too_deep() from None
    if _num_openings(body) > MOST_LEVELS and _is_deep(_STRING.sub(b"", body)):
        raise _too_deep()
    _check(record)
    return record


def _check_structures(body: bytes) -> None:
    if _num_openings(body) > MOST_STRUCTURES and _num_openings(_STRING.sub(b"", body)) > MOST_STRUCTURES:
        raise ApiError(400, f"the body holds more than {MOST_STRUCTURES} lists and objects", code="too_many_structures")


def _is_deep(plain: bytes) -> bool:
    """Of JSON without its strings: each turn takes a level away, the innermost."""
    brackets = plain.translate(_AS_LISTS, _NO_BRACKETS)
    for _ in range(MOST_LEVELS):
        brackets = brackets.replace(b"[]", b"")
    return bool(brackets)


def _too_deep() -> ApiError:
    return ApiError(400, f"the body is nested too deeply: {MOST_LEVELS} levels at most", code="invalid_json")


def _num_openings(text: bytes) -> int:
    return text.count(b"[") + text.count(b"{")


def _decode(body: bytes, kind: type[T]) -> T:
    """A whole number may be written 16.0, as JSON has it: msgspec has it otherwise, so such a body is read once more."""
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.ValidationError as error:
        if "got `float`" not in str(error):
            raise
    return msgspec.convert(_with_whole_numbers(msgspec.json.decode(body)), kind)


def _with_whole_numbers(value: Any) -> Any:
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, dict):
        return {name: _with_whole_numbers(one) for name, one in value.items()}
    if isinstance(value, list):
        return [_with_whole_numbers(one) for one in value]
    return value


def _check(record: Any) -> None:
    refuse_not_served(record, record.OFF)
    for message in getattr(record, "messages", None) or ():
        refuse_not_served(message, message.OFF)
    for name in ("stream_options", "structured_outputs"):
        options = getattr(record, name, None)
        if options is not None:
            refuse_not_served(options, options.OFF)


def _refusal(message: str, kind: type) -> ApiError:
    place = _PLACE.search(message)
    path = "" if place is None else place["path"]
    said = message if place is None else message[: place.start()]
    if unknown := _UNKNOWN.match(said):
        return refused(_join(path, unknown["field"]), _unknown(path, unknown["field"], kind), "unknown_field")
    if missing := _MISSING.match(said):
        return refused(_join(path, missing["field"]), "is missing", "missing_field")
    return refused(path or "body", said.replace("`", "").replace("Expected", "must be", 1))


def _unknown(path: str, field: str, kind: type) -> str:
    known = [] if path else [one.name for one in msgspec.structs.fields(kind)]
    near = get_close_matches(field, known, n=3)
    return "unknown field" + (f"; did you mean {' or '.join(near)}?" if near else "")


def _join(path: str, field: str) -> str:
    shown = field if len(field) <= 100 else field[:100] + "…"
    return f"{path}.{shown}" if path else shown
