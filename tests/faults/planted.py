"""Faults planted at the border, in Python: a scheduler that breaks one promise towards its caller and is right otherwise.

Before: a test of a check needs a fault that no line of the core can have alone. After: every `Driver` made in the meantime
gets the faulty scheduler. These need no special build of the core.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np

from blocktable._core import Commit, Scheduler


class Faulty:
    """Passes every call on to a real scheduler."""

    def __init__(self, **config: Any) -> None:
        self._real = Scheduler(**config)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)


class ResultsBeforeAborts(Faulty):
    """An abort in flight says yes and takes effect after the commit only."""

    def __init__(self, **config: Any) -> None:
        super().__init__(**config)
        self._in_flight = False
        self._later: list[int] = []

    def plan(self, now_us: int) -> Any:
        plan = self._real.plan(now_us)
        self._in_flight = plan.num_seqs > 0
        return plan

    def abort(self, request_id: int) -> bool:
        if not self._in_flight:
            return self._real.abort(request_id)
        self._later.append(request_id)
        return True

    def commit(self, step: int, token_ids: Any, starts: Any, now_us: int) -> Commit:
        done = self._real.commit(step, token_ids, starts, now_us)
        self._in_flight = False
        for request_id in self._later:
            self._real.abort(request_id)
        self._later.clear()
        return done


class ResetForgetsNothing(Faulty):
    """A reset of the prefix cache counts what there is to forget and keeps it."""

    def reset_prefix_cache(self) -> int:
        return int((self._real.block_refs()[self._real.published_blocks()] == 0).sum())


class AbortEndsAll(Faulty):
    """An abort of one request ends every other one as well (there is one flag for all)."""

    def abort(self, request_id: int) -> bool:
        ended = self._real.abort(request_id)
        for other in range(request_id):
            self._real.abort(other)
        return ended


class NoLimitOfTheLine(Faulty):
    """The waiting line takes in whatever comes."""

    def __init__(self, **config: Any) -> None:
        super().__init__(**(config | {"max_waiting": 1 << 20}))


class RefusedCommitEndsTheStep(Faulty):
    """A refused commit is half done: the step is over."""

    def commit(self, step: int, token_ids: Any, starts: Any, now_us: int) -> Commit:
        try:
            return self._real.commit(step, token_ids, starts, now_us)
        except ValueError:
            self._real.fail(step)
            raise


class ClampsWhatIsBad(Faulty):
    """Takes the nearest good value instead of refusing a bad one."""

    def __init__(self, **config: Any) -> None:
        super().__init__(**{name: self._clamped(name, value) for name, value in config.items()})

    def submit(self, token_ids: Any, *, max_tokens: int, **options: Any) -> int:
        ids = [min(max(0, int(token)), 100) for token in np.ravel(np.array(token_ids, object))][:10] or [0]
        most = min(max(1, max_tokens), 1 << 20)
        options["min_tokens"] = min(max(0, options.get("min_tokens", 0)), most)
        options["stop_token_ids"] = []
        return self._real.submit(ids, max_tokens=most, **options)

    @staticmethod
    def _clamped(name: str, value: Any) -> Any:
        least = {"num_blocks": 2, "max_model_len": 2, "long_prefill_threshold": 0}.get(name, 1)
        return min(max(least, value), 1 << 16) if isinstance(value, int) and not isinstance(value, bool) else value


class EndsAnyStep(Faulty):
    """Commit and fail believe whatever step they are told."""

    def commit(self, step: int, token_ids: Any, starts: Any, now_us: int) -> Any:
        return None

    def fail(self, step: int) -> None:
        return None


class AbortSaysYes(Faulty):
    """An abort of nobody is said to have worked."""

    def abort(self, request_id: int) -> bool:
        self._real.abort(request_id)
        return True


class TellsEndsOnce(Faulty):
    """What a plan has no room to report is forgotten."""

    def plan(self, now_us: int) -> Any:
        told = self._real.plan(now_us)
        while told.num_seqs == 0 and len(told.ended) and len(self._real.plan(now_us).ended):
            pass
        return told


class CountsNoLoss(Faulty):
    """Tokens that are given up but for a preemption are not counted."""

    def stats(self) -> Any:
        return self._real.stats() | {"put_back_tokens": 0, "failed_tokens": 0}


class OneBufferForAll(Faulty):
    """The arrays of a step in flight lie in memory that the next submit uses too."""

    def plan(self, now_us: int) -> Any:
        real = self._real.plan(now_us)
        names = [name for name in dir(real) if not name.startswith("_")]
        self._plan = SimpleNamespace(**{name: getattr(real, name) for name in names})
        self._plan.token_ids = real.token_ids.copy()
        return self._plan

    def submit(self, token_ids: Any, **options: Any) -> int:
        if hasattr(self, "_plan"):
            self._plan.token_ids[:1] = token_ids[0]
        return self._real.submit(token_ids, **options)


@contextmanager
def planted(fault: type[Faulty]) -> Iterator[None]:
    """Every driver made inside gets a scheduler with this fault."""
    with patch("blocktable.testing.driver.Scheduler", fault):
        yield
