"""The exactness kit, in two halves. Needs numpy only; `allocator_machine` needs the extra `testing`.

For whoever runs a `Scheduler`: an oracle model, an outside recount of the pool, and seeded schedules. Nothing in here knows how
the scheduler decides; it sees what a kernel and a caller see.

    from blocktable.testing import run_schedule
    report = run_schedule(seed=7)      # arrivals, aborts, failed steps, a tiny pool; every answer checked

For whoever writes a block allocator: the promises of one, checked after every call, over anything that implements `Allocator`.

    from blocktable.testing import find_bug
    print(find_bug(MyAllocator))       # None, or the shortest list of calls that breaks a promise

Before: something that somebody wants to trust. After: an `AssertionError` (or the core's own `AuditError`) at the first call
that breaks a promise.
"""

from typing import TYPE_CHECKING, Any

from blocktable.errors import MissingExtraError

from .ahead_driver import AheadDriver
from .allocator import Allocator, Copy, MakeAllocator, Picture, PoolFull
from .allocator_script import run_allocator_script
from .audit import REFUSALS, BrokenPromise, Snapshot, audit, check_drained, check_plan
from .blocktable_allocator import BlocktableAllocator
from .bug import Bug, find_bug
from .call import Call
from .driver import Driver, Request, Turn
from .oracle import ColdAnswer, OracleError, OracleModel, cold
from .plain_allocator import PlainAllocator
from .schedule import Case, Report, case_of, run_schedule
from .shadow_memory import ShadowMemory
from .vllm_allocator import VllmAllocator
from .watch import Watch

if TYPE_CHECKING:
    from .state_machine import allocator_machine

__all__ = [
    "REFUSALS",
    "AheadDriver",
    "Allocator",
    "BlocktableAllocator",
    "BrokenPromise",
    "Bug",
    "Call",
    "Case",
    "ColdAnswer",
    "Copy",
    "Driver",
    "MakeAllocator",
    "OracleError",
    "OracleModel",
    "Picture",
    "PlainAllocator",
    "PoolFull",
    "Report",
    "Request",
    "ShadowMemory",
    "Snapshot",
    "Turn",
    "VllmAllocator",
    "Watch",
    "allocator_machine",
    "audit",
    "case_of",
    "check_drained",
    "check_plan",
    "cold",
    "find_bug",
    "run_allocator_script",
    "run_schedule",
]


def __getattr__(name: str) -> Any:
    if name != "allocator_machine":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        from .state_machine import allocator_machine
    except ModuleNotFoundError as error:
        raise MissingExtraError("blocktable.testing.allocator_machine", "testing", "hypothesis") from error
    return allocator_machine
