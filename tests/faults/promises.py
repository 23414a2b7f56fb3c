"""The table of promises: (numbers of the fault catalogue, check, planted faults that the check must catch), one row each.

Before: a test module makes a `Promises` and puts `row` over each of its tests. After: `test_of_mutants` runs each test
again with each fault planted in the core, `test_of_planted` with each fault planted at the border, and demand that it fails.
A test is its own check, so there is nothing to keep in step.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from blocktable import _core
from blocktable.errors import AuditError, StalledError
from tests.faults.planted import Faulty, planted

CAUGHT = (AssertionError, AuditError, StalledError, pytest.fail.Exception)
"""How a check may notice a planted fault; the last is what `pytest.raises` says. A crash, a panic or a refusal of good input is
no check."""

Check = Callable[[], None]


@dataclass(frozen=True)
class Row:
    """One promise."""

    faults: tuple[int, ...]
    check: Check
    mutants: tuple[str, ...]  # in the core
    planted: tuple[type[Faulty], ...]  # at the border


@dataclass
class Promises:
    """The rows of one test module."""

    rows: list[Row] = field(default_factory=list)

    def row(
        self, *faults: int, mutants: tuple[str, ...] = (), planted: tuple[type[Faulty], ...] = ()
    ) -> Callable[[Check], Check]:
        """Register the decorated test, which takes no arguments."""
        if not mutants and not planted:
            raise ValueError("a promise needs a fault that its check catches")

        def register(check: Check) -> Check:
            self.rows.append(Row(faults, check, mutants, planted))
            return check

        return register

    def test_of_mutants(self) -> Callable[[Row, str], None]:
        """A test for each pair of a row and one of its planted faults. To be bound to a name that begins with `test_`."""
        pairs = [
            pytest.param(row.check, mutant, id=f"{row.check.__name__}-{mutant}") for row in self.rows for mutant in row.mutants
        ]

        @pytest.mark.mutant
        @pytest.mark.parametrize(("check", "mutant"), pairs)
        def test(check: Check, mutant: str) -> None:
            must_fail(check, mutant)

        return test

    def test_of_planted(self) -> Callable[[Check, type[Faulty]], None]:
        """The same for faults at the border, which every build of the core can have."""
        pairs = [
            pytest.param(row.check, fault, id=f"{row.check.__name__}-{fault.__name__}")
            for row in self.rows
            for fault in row.planted
        ]

        @pytest.mark.parametrize(("check", "fault"), pairs)
        def test(check: Check, fault: type[Faulty]) -> None:
            with planted(fault), pytest.raises(CAUGHT):
                check()

        return test


def is_panic(error: BaseException) -> bool:
    """Whether the core broke down under a planted fault instead of being seen to be wrong."""
    return type(error).__name__ == "PanicException"


def must_fail(check: Check, mutant: str) -> BaseException:
    """Run `check` with a planted fault; returns how it noticed. Fails if it did not."""
    _core.set_mutant(mutant)
    try:
        with pytest.raises(CAUGHT) as caught:
            check()
    finally:
        _core.set_mutant(None)
    return caught.value
