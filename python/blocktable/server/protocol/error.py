"""An error as OpenAI's clients read it."""

from __future__ import annotations

import msgspec


class ErrorBody(msgspec.Struct, frozen=True, kw_only=True):
    """What went wrong."""

    message: str
    type: str
    param: str | None
    """The field of the request, such as `messages[0].role`."""
    code: str | None


class ErrorReply(msgspec.Struct, frozen=True):
    """The body of every answer that is not 2xx."""

    error: ErrorBody
