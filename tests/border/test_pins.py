"""A pinned prefix is held until it is given back; over the budget it is refused with the numbers."""

import pytest

from blocktable import InvalidInputError, PinBudgetError, Scheduler

PROMPT = list(range(17))


@pytest.fixture
def pinning(make_scheduler) -> Scheduler:
    """64 blocks of 4 tokens, of which 6 may be pinned."""
    return make_scheduler(pin_budget=6)


@pytest.fixture
def run(pinning, answer):
    """Runs one prompt to its end; its cached tokens."""

    def run(prompt: list[int]) -> int:
        request = pinning.submit(prompt, max_tokens=1)
        while (plan := pinning.plan(0)).num_seqs:
            answer(pinning, plan)
        return pinning.num_cached_tokens(request)

    return run


def test_a_pinned_prefix_survives_a_flood_of_ten_times_the_pool(pinning, run):
    run(PROMPT)
    pin, tokens = pinning.pin(PROMPT)
    assert tokens == 16
    for first in range(160):
        run([first % 100, (first * 7 + 1) % 100] * 8)
    assert pinning.stats()["evictions"] > 10 * 60 - 64
    assert run(PROMPT) == 16
    pinning.unpin(pin)
    for first in range(160):
        run([first % 100, (first * 3 + 1) % 100] * 8)
    assert run(PROMPT) == 0, "without its pin it went with the flood"
    pinning.audit()


def test_a_pin_over_the_budget_is_refused_with_the_numbers(pinning, run):
    other = [50] * 17
    run(PROMPT)
    run(other)
    pinning.pin(PROMPT)
    before = pinning.block_refs().tolist()
    with pytest.raises(PinBudgetError) as refused:
        pinning.pin(other)
    assert (refused.value.needed, refused.value.pinned, refused.value.budget) == (4, 4, 6)
    assert pinning.block_refs().tolist() == before
    assert pinning.stats()["pinned_blocks"] == 4
    assert pinning.pin(other[:9])[1] == 8


def test_what_cannot_be_pinned_or_given_back_is_refused_by_name(pinning, run, make_scheduler):
    for scheduler, field, call in (
        (pinning, "token_ids", lambda: pinning.pin(PROMPT)),
        (pinning, "pin", lambda: pinning.unpin(1)),
        (pinning, "pin", lambda: pinning.unpin(-1)),
    ):
        with pytest.raises(InvalidInputError) as refused:
            call()
        assert refused.value.field == field
        scheduler.audit()
    run(PROMPT)
    pin, _ = pinning.pin(PROMPT)
    pinning.unpin(pin)
    with pytest.raises(InvalidInputError):
        pinning.unpin(pin)
    with pytest.raises(InvalidInputError, match="pin_budget"):
        make_scheduler(pin_budget=64)


@pytest.mark.mutant
@pytest.mark.parametrize("fault", ["pin_over_budget", "unpin_keeps_holder"])
def test_a_planted_fault_of_a_pin_is_caught(fault, pinning, run):
    from blocktable import AuditError, _core

    run(PROMPT)
    run([50] * 17)
    _core.set_mutant(fault)
    try:
        pin, _ = pinning.pin(PROMPT)
        if fault == "pin_over_budget":
            pinning.pin([50] * 17)
        else:
            pinning.unpin(pin)
        with pytest.raises(AuditError):
            pinning.audit()
    finally:
        _core.set_mutant(None)
