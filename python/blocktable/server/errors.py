"""How a refusal or a failure reads to a client: a status and OpenAI's error shape, for each error of the family.

Before: a route, or the engine behind it, raises. After: `endpoint.py` answers, and `sse.py` where headers have gone already.
Always: bad input is 4xx and names its field in `param`; what the client could do about it stands in the message; nothing of
the inside (a path, a stack) leaves.
"""

from __future__ import annotations

import logging
import math

from ..errors import (
    BlocktableError,
    EngineDeadError,
    InvalidGrammarError,
    InvalidInputError,
    MissingExtraError,
    NeverFitsError,
    QueueFullError,
    ShutDownError,
    UnknownOptionError,
)
from ..sampling.params import LEAVE_A_CHOICE
from .protocol.error import ErrorBody, ErrorReply

logger = logging.getLogger("blocktable.server")

RETRY_ELSEWHERE_S = 1
"""`Retry-After` of a server that drains: behind a load balancer the next try meets another one."""


class ApiError(BlocktableError):
    """An answer that is an error. `param` names the field of the request, `code` is one word for programs."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.headers = headers or {}
        self.reply = ErrorReply(error=ErrorBody(message=message, type=kind, param=param, code=code))


def refused(param: str, message: str, code: str = "invalid_value") -> ApiError:
    """A 400 about one field."""
    return ApiError(400, f"{param}: {message}", param=param, code=code)


def disagree(param: str, message: str) -> ApiError:
    """A 400 about fields that are right alone and wrong together."""
    return refused(param, message, "fields_disagree")


def unavailable(message: str, code: str, *, retry_after_s: int | None = None) -> ApiError:
    """A 503."""
    headers = {} if retry_after_s is None else {"retry-after": str(retry_after_s)}
    return ApiError(503, message, kind="service_unavailable_error", code=code, headers=headers)


def api_error(error: BaseException) -> ApiError:
    """What a client gets for this. An error that is nobody's input is logged, and told as a plain 500."""
    match error:
        case ApiError():
            return error
        case UnknownOptionError():
            return ApiError(400, str(error), param=error.field, code="unknown_field")
        case InvalidGrammarError():
            return ApiError(400, str(error), param=error.field, code="invalid_grammar")
        case MissingExtraError():
            return ApiError(
                400, f"{error.what} is not served here: {error.missing} is not installed", param=error.what, code="not_served"
            )
        case InvalidInputError():
            code = "not_served" if "not served" in error.bound else "invalid_value"
            if error.bound == LEAVE_A_CHOICE:
                code = "fields_disagree"
            return ApiError(400, str(error), param=error.field, code=code)
        case NeverFitsError():
            return ApiError(400, str(error), param="prompt", code="never_fits")
        case QueueFullError():
            return _queue_full(error)
        case ShutDownError():
            return unavailable("the server is shutting down", "draining", retry_after_s=RETRY_ELSEWHERE_S)
        case EngineDeadError():
            return unavailable(str(error), "engine_dead")
    logger.error("a request met a fault of ours: %r", error, exc_info=error)
    return ApiError(500, "a fault of the server, noted in its log", kind="server_error", code="internal_error")


def _queue_full(error: QueueFullError) -> ApiError:
    """Whole seconds, rounded up, until the line had room at the rate of late; left out where nobody can know."""
    after_us = error.retry_after_us
    headers = {} if after_us is None else {"retry-after": str(max(1, math.ceil(after_us / 1e6)))}
    message = f"too many requests wait: {error.waiting} of {error.limit} ({error.what})"
    return ApiError(429, message, kind="rate_limit_error", code="queue_full", headers=headers)
