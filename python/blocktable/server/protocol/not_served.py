"""Fields whose feature is not served yet: they exist, and any value but the one that leaves them off is refused by name.

A request's class lists them with those values; the field's type is `NotServed`, which reads anything. `openapi.py` shows the
listed values as the only ones.
"""

from __future__ import annotations

from typing import Any

from ...errors import InvalidInputError

NotServed = Any

Off = dict[str, tuple[Any, ...]]
"""Field -> values, beside null, that leave it off."""


def refuse_not_served(body: Any, off: Off) -> None:
    """Raises `InvalidInputError` for the first field that is neither null nor off."""
    for name, values in off.items():
        value = getattr(body, name)
        if value is not None and not any(_is_same(value, one) for one in values):
            at = "" if not values else f", or at {' or '.join(map(repr, values))}"
            raise InvalidInputError(name, value, f"is not served yet: leave it out{at}")


def _is_same(value: Any, off: Any) -> bool:
    """As JSON has it: 0 is 0.0, but not false."""
    return isinstance(value, bool) is isinstance(off, bool) and bool(value == off)
