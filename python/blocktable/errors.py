"""The exceptions of blocktable: a closed family, each with the numbers that its reader needs.

Before: `rust/py/src/error.rs` maps every refusal of the core to one of these; the engine raises them itself for bad
options and requests. Nothing else is raised on bad input.
"""

from collections.abc import Iterable
from difflib import get_close_matches
from reprlib import Repr
from typing import Any

_short = Repr()
_short.maxstring = _short.maxother = 200


def _shown(value: Any) -> str:
    """At most some 200 characters of a value, whatever its size."""
    try:
        return _short.repr(value)
    except ValueError:
        # Whole numbers of thousands of digits refuse to be written out.
        return f"a number of {value.bit_length()} bits"


class BlocktableError(Exception):
    """Root of the family. They can be copied, and sent to other processes, as long as the values that they hold can."""

    def __reduce__(self) -> tuple[Any, ...]:
        # `args` is the text, not what the class is made from.
        return _made_again, (type(self), self.args), self.__dict__


def _made_again(kind: type[BlocktableError], args: tuple[Any, ...]) -> BlocktableError:
    error = kind.__new__(kind)
    error.args = args
    return error


class InvalidInputError(BlocktableError, ValueError):
    """A value from outside is not acceptable. Names the field, the value and the bound that it breaks."""

    def __init__(self, field: str, value: Any, bound: str) -> None:
        super().__init__(f"{field}={_shown(value)}: {bound}")
        self.field = field
        self.value = value
        self.bound = bound


class InvalidGrammarError(InvalidInputError):
    """A shape for texts that cannot be read, that no text has, or that costs more than it may. `bound` says which."""


class UnknownOptionError(InvalidInputError):
    """An option that does not exist; names the nearest ones that do."""

    def __init__(self, option: str, value: Any, known: Iterable[str]) -> None:
        names = sorted(known)
        near = get_close_matches(option, names, n=3)
        bound = (
            f"unknown option; did you mean {' or '.join(near)}?" if near else f"unknown option; known are {', '.join(names)}"
        )
        super().__init__(option, value, bound)


class NeverFitsError(BlocktableError):
    """Refused at submit: even alone the request needs more blocks than the pool can ever give."""

    def __init__(self, needed: int, usable: int) -> None:
        super().__init__(f"the request needs {needed} KV blocks, the pool has {usable} usable ones")
        self.needed = needed
        self.usable = usable


class QueueFullError(BlocktableError):
    """Refused at submit: as much waits as may wait.

    `what` names the limit, `waiting` is how much waits. `retry_after_us`: when there will be room at the rate at which
    requests were admitted lately, in microseconds of the caller's clock; None before the first was.
    """

    def __init__(
        self, limit: int, what: str = "max_waiting", waiting: int | None = None, retry_after_us: int | None = None
    ) -> None:
        waiting = limit if waiting is None else waiting
        retry = "" if retry_after_us is None else f"; retry after {retry_after_us} us"
        super().__init__(f"the queue is full: {waiting} wait, {limit} may ({what}){retry}")
        self.limit = limit
        self.what = what
        self.waiting = waiting
        self.retry_after_us = retry_after_us


class OutOfBlocksError(BlocktableError):
    """Fewer blocks are free than a call needs; nothing was taken. Wait, release or preempt."""

    def __init__(self, needed: int, free: int) -> None:
        super().__init__(f"{needed} KV blocks are needed, {free} are free")
        self.needed = needed
        self.free = free


class NotHeldError(BlocktableError):
    """A block was to be released that the caller does not hold (any more)."""

    def __init__(self, block: int) -> None:
        super().__init__(f"block {block} is not held by the caller")
        self.block = block


class NotRunningError(BlocktableError):
    """A fork needs a running parent, and this request waits."""

    def __init__(self, request_id: int) -> None:
        super().__init__(f"request {request_id} does not run")
        self.request_id = request_id


class NoFreeRowError(BlocktableError):
    """A fork needs a row, and every row is had by a running request."""

    def __init__(self, rows: int) -> None:
        super().__init__(f"all {rows} rows are had by running requests")
        self.rows = rows


class BeingWrittenError(BlocktableError):
    """The rows that were to be copied are written by a step in flight."""

    def __init__(self, block: int) -> None:
        super().__init__(f"block {block} is written by the step in flight")
        self.block = block


class NoSuchBlockError(BlocktableError, IndexError):
    """A block id at or past the end of the pool."""

    def __init__(self, block: int, num_blocks: int) -> None:
        super().__init__(f"block {block}: must be below {num_blocks}")
        self.block = block
        self.num_blocks = num_blocks


class ReleasedError(BlocktableError):
    """A table was used, or released, after it had been released or its pool had been reset."""

    def __init__(self) -> None:
        super().__init__("the table was released, or its pool was reset")


class ForeignTableError(BlocktableError):
    """A table of one pool was given to another pool's cache."""

    def __init__(self) -> None:
        super().__init__("the table belongs to another pool")


class PinBudgetError(BlocktableError):
    """A pin would hold more blocks than pins may hold together. `needed`: blocks that no other pin has."""

    def __init__(self, needed: int, pinned: int, budget: int) -> None:
        super().__init__(f"the pin needs {needed} blocks more, {pinned} are pinned and {budget} may be (pin_budget)")
        self.needed = needed
        self.pinned = pinned
        self.budget = budget


class UnknownRequestError(BlocktableError, KeyError):
    """No request of this id is known any more, or ever was."""

    def __init__(self, request_id: int) -> None:
        super().__init__(f"request {request_id} is not known")
        self.request_id = request_id

    def __str__(self) -> str:
        return str(self.args[0])


class StepInFlightError(BlocktableError):
    """`plan` was called while a step is neither committed nor failed."""

    def __init__(self, step: int) -> None:
        super().__init__(f"step {step} is still in flight: commit or fail it first")
        self.step = step


class WrongStepError(BlocktableError):
    """`commit` or `fail` named a step that is not in flight."""

    def __init__(self, given: int, expected: int | None) -> None:
        in_flight = "no step is in flight" if expected is None else f"step {expected} is in flight"
        super().__init__(f"step {given} was named, but {in_flight}")
        self.given = given
        self.expected = expected


class StalledError(BlocktableError):
    """Runnable work cannot move although nothing is in flight: a fault of ours. Names the request and what it waits for.

    `waits_for` is what the plan noted (`reason`, `code`, `numbers`, `words`), or None if nobody noted why. In blocks:
    `needed` by the request beside what it has, `free` (of those `promised`), `parked` until what is in flight has ended,
    `pinned`. `held_by`: (request id, blocks) of those that hold most.
    """

    def __init__(self, text: str, report: dict[str, Any]) -> None:
        super().__init__(text)
        self.report = report
        self.request_id: int = report["request_id"]
        self.is_running: bool = report["is_running"]
        self.waits_for: dict[str, Any] | None = report["waits_for"]
        self.needed: int = report["needed"]
        self.free: int = report["free"]
        self.promised: int = report["promised"]
        self.parked: int = report["parked"]
        self.pinned: int = report["pinned"]
        self.held_by: list[tuple[int, int]] = report["held_by"]


class EngineDeadError(BlocktableError, RuntimeError):
    """The engine behind an `AsyncLLM` has failed, or is not in this process: no request of it will go on. `__cause__` is what
    ended it, where there is something."""

    def __init__(self, reason: str) -> None:
        super().__init__(f"the engine is dead: {reason}")
        self.reason = reason


class ShutDownError(BlocktableError, RuntimeError):
    """Refused: the engine was shut down before the request was queued."""

    def __init__(self) -> None:
        super().__init__("the engine was shut down: make a new one")


class RecordingError(BlocktableError, OSError):
    """A recording cannot be written, and why."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class AuditError(BlocktableError):
    """An invariant does not hold: a fault of ours. `check` is its name in the audit (A1 to A8)."""

    def __init__(self, check: str, detail: str) -> None:
        super().__init__(f"{check}: {detail}")
        self.check = check
        self.detail = detail


class EndpointError(BlocktableError, OSError):
    """An address cannot be bound or connected to, and why."""

    def __init__(self, endpoint: str, reason: str) -> None:
        super().__init__(f"{endpoint}: {reason}")
        self.endpoint = endpoint
        self.reason = reason


class FrameError(BlocktableError, ValueError):
    """What came over the socket between a server and its engine is no record, and why."""

    def __init__(self, reason: str) -> None:
        super().__init__(f"broken frame: {reason}")
        self.reason = reason


class MissingExtraError(BlocktableError, ImportError):
    """Something was used whose dependencies are an extra that is not installed."""

    def __init__(self, what: str, extra: str, missing: str) -> None:
        super().__init__(f'{what} needs {missing}, which is not installed: pip install "blocktable[{extra}]"')
        self.what = what
        self.extra = extra
        self.missing = missing


class UnsupportedModelError(BlocktableError):
    """The model cannot be served, and why."""

    def __init__(self, model: str, reason: str) -> None:
        super().__init__(f"{model}: cannot be served: {reason}")
        self.model = model
        self.reason = reason


class ModelLoadError(BlocktableError):
    """The model's files are missing or broken."""

    def __init__(self, model: str, reason: str) -> None:
        super().__init__(f"{model}: cannot be loaded: {reason}")
        self.model = model
        self.reason = reason
