"""What comes out when a call is refused: always one of the family, with its numbers, and the scheduler goes on."""

import copy
import pickle
from collections.abc import Iterable
from inspect import signature
from typing import Any

import numpy as np
import pytest

from blocktable import (
    BlocktableError,
    InvalidInputError,
    StepInFlightError,
    UnknownRequestError,
    WrongStepError,
    _core,
    errors,
)

ONE = (np.array([1]), np.array([0, 1]))


def test_a_second_plan_before_the_commit_is_refused(scheduler):
    scheduler.submit([1, 2], max_tokens=2)
    plan = scheduler.plan(0)
    with pytest.raises(StepInFlightError) as caught:
        scheduler.plan(0)
    assert caught.value.step == plan.step
    scheduler.commit(plan.step, *ONE, 0)
    scheduler.audit()


def test_a_commit_of_another_step_names_both(scheduler):
    scheduler.submit([1, 2], max_tokens=2)
    plan = scheduler.plan(0)
    with pytest.raises(WrongStepError) as caught:
        scheduler.commit(plan.step + 5, *ONE, 0)
    assert (caught.value.given, caught.value.expected) == (plan.step + 5, plan.step)
    with pytest.raises(WrongStepError):
        scheduler.fail(plan.step + 1)
    scheduler.fail(plan.step)
    scheduler.audit()


@pytest.mark.parametrize("finish", ["commit", "fail"])
def test_a_step_ends_once(scheduler, finish):
    scheduler.submit([1, 2], max_tokens=2)
    plan = scheduler.plan(0)
    if finish == "commit":
        scheduler.commit(plan.step, *ONE, 0)
    else:
        scheduler.fail(plan.step)
    with pytest.raises(WrongStepError) as caught:
        scheduler.commit(plan.step, *ONE, 0)
    assert caught.value.expected is None
    with pytest.raises(WrongStepError):
        scheduler.fail(plan.step)


@pytest.mark.parametrize("step", [-1, 2**70])
def test_a_step_that_cannot_be_is_refused(scheduler, step):
    scheduler.submit([1, 2], max_tokens=2)
    scheduler.plan(0)
    with pytest.raises(BlocktableError):
        scheduler.commit(step, *ONE, 0)
    with pytest.raises(BlocktableError):
        scheduler.fail(step)


def test_an_unknown_request_has_no_cached_tokens(scheduler):
    with pytest.raises(UnknownRequestError) as caught:
        scheduler.num_cached_tokens(12345)
    assert caught.value.request_id == 12345


def test_aborting_what_never_was_or_has_ended_says_so(scheduler):
    assert scheduler.abort(12345) is False
    request = scheduler.submit([1, 2], max_tokens=2)
    assert scheduler.abort(request) is True
    assert scheduler.abort(request) is False
    assert scheduler.finish(request) is False


def test_an_unknown_fault_is_refused():
    with pytest.raises(InvalidInputError) as caught:
        _core.set_mutant("no such fault")
    assert caught.value.value == "no such fault"
    _core.set_mutant(None)


FAMILY = [value for value in vars(errors).values() if isinstance(value, type) and issubclass(value, Exception)]


def test_every_refusal_is_of_one_family():
    assert len(FAMILY) > 10
    assert all(issubclass(kind, BlocktableError) for kind in FAMILY)
    assert issubclass(InvalidInputError, ValueError)
    assert issubclass(UnknownRequestError, KeyError)


def made(kind: type[BlocktableError]) -> BlocktableError:
    """One of its kind, each argument by its type."""
    if kind is BlocktableError:
        return kind("a text")
    samples = {int: 7, str: "a text", Any: 2.5, int | None: 7, Iterable[str]: ["a text"]}
    stall = dict.fromkeys(
        ("request_id", "is_running", "waits_for", "needed", "free", "promised", "parked", "pinned", "held_by"), 7
    )
    parameters = list(signature(kind).parameters.values())
    values = [stall if parameter.name == "report" else samples[parameter.annotation] for parameter in parameters]
    return kind(*values)


@pytest.mark.parametrize("again", [copy.copy, copy.deepcopy, lambda error: pickle.loads(pickle.dumps(error))])
@pytest.mark.parametrize("kind", FAMILY, ids=lambda kind: kind.__name__)
def test_a_refusal_can_be_copied_and_sent_to_another_process(kind, again):
    error = made(kind)
    error.add_note("what was tried")
    other = again(error)
    assert type(other) is kind
    assert (str(other), other.args, vars(other)) == (str(error), error.args, vars(error))
