"""The records that cross between the server and its engine process, and how errors cross.

Before: `process_client.py` sends orders. After: `engine_process.py` carries them out and sends back what the other half of this
file names. Always: requests and questions are named by numbers that the server chose and never uses again; a typed error of
`errors.py` comes out as it went in, with its fields.
"""

from __future__ import annotations

import msgspec

from ..errors import (
    BlocktableError,
    EndpointError,
    EngineDeadError,
    InvalidGrammarError,
    InvalidInputError,
    MissingExtraError,
    ModelLoadError,
    NeverFitsError,
    NoSuchBlockError,
    QueueFullError,
    ShutDownError,
    UnknownRequestError,
    UnsupportedModelError,
)
from .engine_client import EngineInfo, EngineRequest, Piece

Plain = None | bool | int | float | str


class Launch(msgspec.Struct, tag=1, array_like=True, frozen=True):
    """The first record: what to build. `builder` is a function, as `module:name`, called as `build_engine` is."""

    model: str
    tokenizer: str | None
    options: dict[str, object]
    builder: str
    beat_s: float
    """Seconds between two beats."""
    log_level: str
    log_is_json: bool


class Submit(msgspec.Struct, tag=2, array_like=True, frozen=True):
    """Answer this."""

    number: int
    request: EngineRequest


class Abort(msgspec.Struct, tag=3, array_like=True, frozen=True):
    """Nobody reads this one any more."""

    number: int


class Ask(msgspec.Struct, tag=4, array_like=True, frozen=True):
    """A question, `what` being the name of a method of `EngineClient`."""

    number: int
    what: str
    about: str | None = None


class Stop(msgspec.Struct, tag=5, array_like=True, frozen=True):
    """End everything, then the process."""


class ErrorRecord(msgspec.Struct, array_like=True, frozen=True):
    """A typed error: its class and what it is made of."""

    kind: str
    parts: list[Plain]

    @classmethod
    def of(cls, error: BaseException) -> ErrorRecord:
        """The record of any exception. What is not in the table crosses as its text."""
        for kind, names in _PARTS.items():
            if isinstance(error, kind):
                return cls(kind.__name__, [_plain(getattr(error, name)) for name in names])
        return cls(BlocktableError.__name__, [str(error) if isinstance(error, BlocktableError) else repr(error)])

    def error(self) -> Exception:
        """The error again."""
        for kind, names in _PARTS.items():
            if kind.__name__ == self.kind and len(names) == len(self.parts):
                return kind(*self.parts)
        return BlocktableError(*self.parts)


class Ready(msgspec.Struct, tag=1, array_like=True, frozen=True):
    """The engine takes requests."""

    info: EngineInfo


class Pieces(msgspec.Struct, tag=2, array_like=True, frozen=True):
    """What a step brought: a piece for each of these requests."""

    numbers: list[int]
    pieces: list[Piece]


class Refused(msgspec.Struct, tag=3, array_like=True, frozen=True):
    """This request ended with an error."""

    number: int
    error: ErrorRecord


class Beat(msgspec.Struct, tag=4, array_like=True, frozen=True):
    """A sign of life, from a thread that waits for no step."""

    num_running: int
    num_waiting: int
    num_steps: int
    still_s: float


class Answer(msgspec.Struct, tag=5, array_like=True, frozen=True):
    """The answer to a question."""

    number: int
    value: object
    error: ErrorRecord | None = None


class Dead(msgspec.Struct, tag=6, array_like=True, frozen=True):
    """The last record: the engine could not be built, or died of this; the process ends."""

    error: ErrorRecord


Order = Launch | Submit | Abort | Ask | Stop
Report = Ready | Pieces | Refused | Beat | Answer | Dead

_PARTS: dict[type[Exception], tuple[str, ...]] = {
    InvalidGrammarError: ("field", "value", "bound"),
    InvalidInputError: ("field", "value", "bound"),
    NeverFitsError: ("needed", "usable"),
    QueueFullError: ("limit", "what", "waiting", "retry_after_us"),
    NoSuchBlockError: ("block", "num_blocks"),
    UnknownRequestError: ("request_id",),
    ShutDownError: (),
    EngineDeadError: ("reason",),
    ModelLoadError: ("model", "reason"),
    UnsupportedModelError: ("model", "reason"),
    MissingExtraError: ("what", "extra", "missing"),
    EndpointError: ("endpoint", "reason"),
}
"""How each error is made again: the attributes that are its arguments. A class stands before those that it is one of."""

MAX_SHOWN = 200


def _plain(value: object) -> Plain:
    """The value itself if it is small and plain, else how it looks."""
    if value is None or isinstance(value, bool | float):
        return value
    if isinstance(value, int) and -(2**63) <= value < 2**63:
        return value
    text = value if isinstance(value, str) else type(value).__name__ if isinstance(value, int) else repr(value)
    return text.encode("utf-8", "backslashreplace").decode()[:MAX_SHOWN]
