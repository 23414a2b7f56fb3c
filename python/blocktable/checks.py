"""Checks of single options that a caller wrote: what is not within its bound is refused by field, value and bound.

Before: a record of options names field and bound. After: it holds only what passed. What is refused raises
`InvalidInputError` and nothing else. What only requests ask for is checked by `sampling/checks.py`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from .errors import InvalidInputError


def flag(field: str, value: Any) -> bool:
    """True or False, and no number that equals one."""
    if not isinstance(value, bool):
        raise InvalidInputError(field, value, "must be True or False")
    return value


def text(field: str, value: Any) -> None:
    """A text that is not empty."""
    if not isinstance(value, str) or not value:
        raise InvalidInputError(field, value, "must be a text that is not empty")


def one_of(field: str, value: Any, known: Collection[str]) -> None:
    """One of the names `known`."""
    if not isinstance(value, str) or value not in known:
        raise InvalidInputError(field, value, f"must be one of {', '.join(known)}")


def whole(field: str, value: Any, low: int, high: int) -> None:
    """A whole number from `low` to `high`; a bool is none, although it is an int to Python."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise InvalidInputError(field, value, f"must be a whole number from {low} to {high}")
    if not low <= value <= high:
        raise InvalidInputError(field, value, f"must be {low}..{high}")


def share(field: str, value: Any) -> None:
    """A part of a whole."""
    if not _is_number(value) or not 0 < value <= 1:
        raise InvalidInputError(field, value, "must be above 0 and at most 1")


def seconds(field: str, value: Any, *, low: float) -> None:
    """A time from `low` seconds to eleven days."""
    if not _is_number(value) or not low <= value <= 1e6:
        raise InvalidInputError(field, value, f"must be a number of seconds from {low:g} to 1e6")


def mapping(field: str, value: Any) -> None:
    """Names and their values."""
    if not isinstance(value, Mapping):
        raise InvalidInputError(field, value, "must be a dictionary")


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
