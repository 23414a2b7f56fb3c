"""The exactness kit: an oracle model, an outside recount of the pool, and seeded schedules. Needs numpy only.

Before: a `Scheduler` that somebody wants to trust. After: an `AssertionError` (or the core's own `AuditError`) at the
first call that breaks a promise. Nothing in here knows how the scheduler decides; it sees what a kernel and a caller see.

    from blocktable.testing import run_schedule
    report = run_schedule(seed=7)      # arrivals, aborts, failed steps, a tiny pool; every answer checked
"""

from .audit import Snapshot, audit, check_drained, check_plan
from .driver import Driver, Request
from .oracle import ColdAnswer, OracleError, OracleModel, cold
from .schedule import Case, Report, case_of, run_schedule

__all__ = [
    "Case",
    "ColdAnswer",
    "Driver",
    "OracleError",
    "OracleModel",
    "Report",
    "Request",
    "Snapshot",
    "audit",
    "case_of",
    "check_drained",
    "check_plan",
    "cold",
    "run_schedule",
]
