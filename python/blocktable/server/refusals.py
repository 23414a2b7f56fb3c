"""How many requests were refused, and why: a closed table, whoever refused them.

Before: `http_protocol.py`, `guard.py`, `endpoint.py` and `app.py`, each where it answers with an error. After: `metrics.py`.
Always: a request that is refused counts once, by the `code` of its answer; one that fails on its way (a step, the engine's
death) is no refusal.
"""

from __future__ import annotations

from collections import Counter
from enum import Enum

from .errors import ApiError


class Refusal(Enum):
    """Why."""

    NOT_HTTP = "not_http"
    """What came is no request of HTTP."""
    NO_KEY = "no_key"
    """An API key is missing or unknown; without keys, another machine or name."""
    NO_SUCH_ROUTE = "no_such_route"
    NO_SUCH_MODEL = "no_such_model"
    UNREADABLE_BODY = "unreadable_body"
    """Another content type than JSON, or no JSON."""
    BODY_TOO_LARGE = "body_too_large"
    BODY_TIMEOUT = "body_timeout"
    UNKNOWN_FIELD = "unknown_field"
    NOT_SERVED = "not_served"
    """A feature that is not served yet."""
    INVALID_INPUT = "invalid_input"
    """Any other fault of a field or of several together, whether the server found it or the engine."""
    TOO_LONG = "too_long"
    """More tokens than the model's length leaves room for."""
    NEVER_FITS = "never_fits"
    QUEUE_FULL = "queue_full"
    QUEUE_DEADLINE = "queue_deadline"
    UNAVAILABLE = "unavailable"
    """The engine is starting, draining or dead."""


REFUSAL_OF = {
    "not_http": Refusal.NOT_HTTP,
    "ambiguous_header": Refusal.NOT_HTTP,
    "invalid_api_key": Refusal.NO_KEY,
    "not_local": Refusal.NO_KEY,
    "no_such_route": Refusal.NO_SUCH_ROUTE,
    "model_not_found": Refusal.NO_SUCH_MODEL,
    "not_json": Refusal.UNREADABLE_BODY,
    "encoded_body": Refusal.UNREADABLE_BODY,
    "invalid_json": Refusal.UNREADABLE_BODY,
    "too_many_structures": Refusal.BODY_TOO_LARGE,
    "body_too_large": Refusal.BODY_TOO_LARGE,
    "body_timeout": Refusal.BODY_TIMEOUT,
    "unknown_field": Refusal.UNKNOWN_FIELD,
    "not_served": Refusal.NOT_SERVED,
    "invalid_value": Refusal.INVALID_INPUT,
    "missing_field": Refusal.INVALID_INPUT,
    "fields_disagree": Refusal.INVALID_INPUT,
    "template_refuses": Refusal.INVALID_INPUT,
    "invalid_arguments": Refusal.INVALID_INPUT,
    "invalid_grammar": Refusal.INVALID_INPUT,
    "context_length_exceeded": Refusal.TOO_LONG,
    "never_fits": Refusal.NEVER_FITS,
    "queue_full": Refusal.QUEUE_FULL,
    "queue_deadline": Refusal.QUEUE_DEADLINE,
    "engine_starting": Refusal.UNAVAILABLE,
    "draining": Refusal.UNAVAILABLE,
    "engine_dead": Refusal.UNAVAILABLE,
}
"""By the `code` of the answer."""

FAILURES = frozenset({"step_failed", "internal_error", "aborted"})
"""Codes of answers that are no refusal."""


class Refusals:
    """Since the server started."""

    def __init__(self) -> None:
        self.counts: Counter[Refusal] = Counter()

    def note(self, error: ApiError) -> None:
        """A request was answered with this before anything of an answer had gone."""
        found = REFUSAL_OF.get(error.reply.error.code or "")
        if found is not None:
            self.counts[found] += 1

    def note_later(self, error: ApiError) -> None:
        """A stream that had begun ended with this. One of its prompts may have been refused; who dies refuses nobody."""
        if REFUSAL_OF.get(error.reply.error.code or "") is not Refusal.UNAVAILABLE:
            self.note(error)
