"""What one client may ask of the HTTP side, in bytes, numbers and seconds.

Before: `blocktable serve` sets them. After: `endpoint.py`, `reader.py` and `generation.py` hold them. Always: what is over a
limit is refused before anything is done for it. Limits of the line and of tenants are the engine's (`EngineConfig`), bounds
of single fields stand in `protocol`.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

from ..errors import InvalidInputError


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Raises `InvalidInputError` for a limit that is not above 0."""

    max_body_bytes: int = 8 * 2**20
    """Bytes of a request; a larger one gets 413 before it is read."""
    max_prompts: int = 128
    """Prompts of one completion request."""
    max_answers: int = 256
    """Answers of one request, prompts times `n`."""
    body_timeout_s: float = 30.0
    """Seconds for the head of a request to come, after it the connection ends; and for a body, after it 408."""
    write_timeout_s: float = 60.0
    """Seconds for a reader to take more of its stream; after it the request is ended."""
    max_request_s: float | None = None
    """Seconds of any request, as if it had set `deadline_s`; None = no limit."""

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if value is None and field.name == "max_request_s":
                continue
            if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
                raise InvalidInputError(field.name, value, "must be a number above 0")
