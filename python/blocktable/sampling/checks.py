"""Checks of single values that a caller wrote: each gives the value in its one form, or refuses it by field and bound.

Before: `params.py` names field and bound. After: the record holds what comes from here. Always: refusing costs the same,
however large the value is; what is refused raises `InvalidInputError` and nothing else.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Mapping
from numbers import Real
from typing import Any

from ..checks import flag
from ..errors import InvalidInputError, UnknownOptionError

__all__ = ["between", "biases", "count", "flag", "num_bytes", "number", "refuse_others", "some", "texts", "token_ids", "whole"]

MAX_COUNT = 2**31 - 1
"""Largest number that counts something, and largest token id."""


def refuse_others(
    others: Mapping[str, object], served: Iterable[str], not_served: Mapping[str, object], prefix: str = ""
) -> None:
    """Options that are not among those `served`: one of `not_served` may be None, or at the value there, which leaves it off;
    any other does not exist. A field is named with `prefix`."""
    for name, value in others.items():
        if name not in not_served:
            raise UnknownOptionError(prefix + name, value, (prefix + known for known in [*served, *not_served]))
        off = not_served[name]
        is_off = isinstance(value, Real) and isinstance(value, bool) is isinstance(off, bool) and value == off
        if value is not None and not is_off:
            at = "" if off is None else f", or at {off}"
            raise InvalidInputError(prefix + name, value, f"is not served yet: leave it out{at}")


def whole(field: str, value: Any) -> int:
    """A whole number, numpy's too; a bool is none, although it is an int to Python."""
    try:
        if isinstance(value, bool):
            raise TypeError
        return operator.index(value)
    except TypeError:
        raise InvalidInputError(field, value, "must be a whole number") from None


def count(field: str, value: Any, low: int) -> int:
    """A whole number from `low` to `MAX_COUNT`."""
    return between(field, whole(field, value), low, MAX_COUNT)


def between(field: str, number: int, low: int, high: int) -> int:
    """`number`, if it lies there."""
    if low <= number <= high:
        return number
    # A number of thousands of digits cannot be shown (and Python refuses to).
    shown = number if number.bit_length() <= 128 else f"a number of {number.bit_length()} bits"
    raise InvalidInputError(field, shown, f"must be {low}..{high}")


def number(field: str, value: Any, *, high: float, low: float = 0.0, above_zero: bool = False) -> float:
    """A finite number from `low` to `high`, 0 not among them if it has to be `above_zero`."""
    # The usual case by the shortest way: asking for `Real` and writing the bound take several times as long.
    if type(value) in (float, int) and low <= value <= high and not (above_zero and value == 0):
        return float(value)
    bound = f"must be a number {'above 0 and at most' if above_zero else f'from {low:g} to'} {high:g}"
    if isinstance(value, bool) or not isinstance(value, Real):
        raise InvalidInputError(field, value, bound)
    try:
        number = float(value)
    except OverflowError:
        raise InvalidInputError(field, "a number beyond all floats", bound) from None
    if not math.isfinite(number) or number > high or number < low or (above_zero and number == 0.0):
        raise InvalidInputError(field, value if number == value else number, bound)
    return number


def texts(field: str, value: Any, most: int, longest: int) -> tuple[str, ...]:
    """At most `most` texts of 1..`longest` characters, each once."""
    if value is None:
        return ()
    texts = some(field, value, most, "texts")
    for i, text in enumerate(texts):
        place = f"{field}[{i}]"
        if not isinstance(text, str):
            raise InvalidInputError(place, text, "must be a text")
        if not 1 <= len(text) <= longest:
            raise InvalidInputError(place, text[:64], f"has {len(text)} characters: must be 1..{longest}")
        num_bytes(place, text)
    return tuple(dict.fromkeys(texts))


def num_bytes(field: str, text: str) -> int:
    """How many bytes of UTF-8 a text has; one with half a character has none."""
    try:
        return len(text.encode())
    except UnicodeEncodeError as error:
        raise InvalidInputError(field, text, f"must be valid Unicode: {error.reason} at {error.start}") from None


def token_ids(field: str, value: Any, most: int) -> tuple[int, ...]:
    """At most `most` token ids, each once."""
    if value is None:
        return ()
    token_ids = some(field, value, most, "token ids")
    return tuple(dict.fromkeys(count(f"{field}[{place}]", token_id, 0) for place, token_id in enumerate(token_ids)))


def biases(field: str, value: Any, most: int, size: float) -> tuple[tuple[int, float], ...]:
    """At most `most` pairs of a token id and a number from -`size` to `size`, by ascending id; of a mapping, whose ids may be
    written as text, or of such pairs."""
    if value is None:
        return ()
    if isinstance(value, Mapping):
        value = tuple(value.items()) if len(value) <= most else value
    elif not isinstance(value, tuple) or not all(isinstance(pair, tuple) and len(pair) == 2 for pair in value[:most]):
        raise InvalidInputError(field, value, "must be a mapping of token ids to numbers")
    if len(value) > most:
        raise InvalidInputError(field, f"{len(value)} token ids", f"must be at most {most}")
    read: dict[int, float] = {}
    for key, bias in value:
        token_id = count(field, int(key) if _is_written_id(key) else key, 0)
        if token_id in read:
            raise InvalidInputError(field, key, "names a token twice")
        read[token_id] = number(f"{field}[{token_id}]", bias, low=-size, high=size)
    return tuple(sorted(read.items()))


def _is_written_id(key: Any) -> bool:
    """A whole number as JSON writes it, of a length that can be a token id's."""
    return isinstance(key, str) and key.isascii() and key.isdigit() and (len(key) == 1 or key[0] != "0") and len(key) <= 10


def some(field: str, value: Any, limit: int, what: str) -> list[Any]:
    """The items of a list or the like; a longer one is refused before it is read."""
    if isinstance(value, str | bytes | bytearray | dict) or not hasattr(value, "__len__") or not hasattr(value, "__iter__"):
        raise InvalidInputError(field, value, f"must be a list of {what}")
    if len(value) > limit:
        raise InvalidInputError(field, f"{len(value)} {what}", f"must be at most {limit}")
    return list(value)
