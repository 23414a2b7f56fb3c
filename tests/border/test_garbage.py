"""A steady decode step makes nothing that a garbage collector has to look at, and allocates nothing in Rust."""

import gc

import numpy as np
import pytest

from blocktable import _core

STEPS = 1000
RUNNING = 32


@pytest.fixture(
    params=[(0, None, False), (4096, None, False), (0, (None, 64, 16), False), (0, None, True)],
    ids=["silent", "events", "windows", "partial hits"],
)
def decoding(make_scheduler, request):
    """A function that runs that many decode steps of 32 sequences, using the results as the engine uses them. With events
    recorded, it reads them after each step; through windows, blocks leave in nearly every one; with partial hits, what every
    block holds is remembered when it fills."""
    event_buffer_size, groups, partial = request.param
    scheduler = make_scheduler(
        num_blocks=RUNNING * (160 if groups is None else 180),
        groups=groups,
        block_size=16,
        max_model_len=2400,
        max_num_seqs=RUNNING,
        max_num_batched_tokens=RUNNING * 20,
        event_buffer_size=event_buffer_size,
        enable_partial_hits=partial,
    )
    for i in range(RUNNING):
        scheduler.submit(list(range(i, i + 20)), max_tokens=2300)
    bank = np.random.default_rng(0).integers(0, 100, (17, RUNNING))
    starts = np.arange(RUNNING + 1)
    inputs = np.empty(RUNNING, np.int32)
    total = next_event = 0

    def step() -> None:
        nonlocal total, next_event
        plan = scheduler.plan(0)
        if plan.num_seqs != RUNNING:
            raise AssertionError(f"{plan.num_seqs} sequences decode, not {RUNNING}")
        # What a model reads: every array of the plan.
        inputs[...] = plan.token_ids[-RUNNING:]
        total += int(plan.slot_mapping[0, -1]) + int(plan.seq_lens[0]) + int(plan.positions[-1]) + int(plan.query_starts[-1])
        total += int(plan.block_tables[0, plan.seq_slots[0], 0]) + len(plan.dirty) + len(plan.dirty_ids) + len(plan.copies)
        total += len(plan.ended) + len(plan.admitted) + len(plan.preempted) + int(plan.sample_requests[0])
        done = scheduler.commit(plan.step, bank[plan.step % len(bank)], starts[: len(plan.sample_rows) + 1], 0)
        total += len(done.ended) + done.num_accepted
        came = scheduler.read_events(next_event)
        if came is not None:
            next_event = int.from_bytes(came[:8], "little")

    def run(steps: int) -> None:
        for _ in range(steps):
            step()

    run(3)  # prefill, and the first decode steps
    return run


def test_a_thousand_decode_steps_leave_the_collector_nothing(decoding):
    gc.collect()
    gc.disable()
    try:
        decoding(50)
        before = gc.get_count()[0]
        decoding(STEPS)
        after = gc.get_count()[0]
    finally:
        gc.enable()
    assert after == before


def test_the_collectors_counter_would_show_one_object_a_step(decoding):
    """The check above can fail: an object kept per step is counted."""
    kept = []
    gc.collect()
    gc.disable()
    try:
        before = gc.get_count()[0]
        kept.extend([] for _ in range(STEPS))
        after = gc.get_count()[0]
    finally:
        gc.enable()
    assert after - before >= STEPS


@pytest.mark.mutant  # only that build counts
def test_a_thousand_decode_steps_allocate_nothing_in_rust(decoding):
    decoding(50)
    before = _core.allocations()
    assert before > 0, "this build does not count allocations"
    decoding(STEPS)
    assert _core.allocations() == before


@pytest.mark.mutant
def test_a_submission_is_counted_as_allocating(decoding, scheduler):
    """The check above can fail."""
    before = _core.allocations()
    scheduler.submit([1, 2, 3], max_tokens=1)
    assert _core.allocations() > before
