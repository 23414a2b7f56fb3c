"""Block accounting (catalogue 1 to 22): nothing leaks, nothing is freed twice, a refused step changes nothing."""

from blocktable.testing import Driver, Snapshot
from tests.faults.promises import Promises
from tests.faults.scene import prompt, scene

PROMISES = Promises()


@PROMISES.row(2, mutants=("keep_key_on_reuse",))
def test_a_block_that_was_handed_out_again_is_not_found_by_its_old_content() -> None:
    """Fault 2: prompt A is evicted by B; A again finds nothing and is answered right."""
    driver = scene(usable=4)
    first = prompt(1, 9)
    driver.generate(first, max_tokens=1)
    assert driver.generate(first, max_tokens=1).cached == 8, "the control: without B, A is found"
    driver.generate(prompt(2, 16), max_tokens=1)
    assert driver.generate(first, max_tokens=1).cached == 0
    driver.drain()


@PROMISES.row(4, 7, 10, mutants=("double_free",))
def test_what_ended_once_cannot_be_ended_again() -> None:
    """Faults 4, 7, 10: of two holders of a block one ends; ending it again, in either way, is refused and moves nothing."""
    driver = scene()
    first = driver.submit(prompt(1, 8), max_tokens=20)
    second = driver.submit(prompt(1, 9), max_tokens=20)
    driver.step()
    assert driver.scheduler.block_refs()[1:4].tolist() == [2, 2, 1], "the control: all blocks of the first are shared"
    assert driver.abort(first)
    before = Snapshot.of(driver.scheduler)
    for _ in range(2):
        assert not driver.abort(first)
        assert not driver.finish(first)
        before.check_unchanged(driver.scheduler)
    assert second.id in driver.live
    driver.drain()


@PROMISES.row(5, mutants=("no_rollback_on_fail", "grow_from_zero"))
def test_blocks_that_a_failed_step_left_behind_are_used_and_not_taken_again() -> None:
    """Fault 5: a sequence holds more blocks than it has rows; its need is the difference, never below zero."""
    driver = scene()
    driver.submit(prompt(1, 30), max_tokens=8)
    driver.plan()
    most = len(driver.scheduler.free_queue())
    for _ in range(5):
        driver.fail()
        assert driver.plan().num_tokens == 30
        assert len(driver.scheduler.free_queue()) >= most
    driver.commit(*driver.forward())
    driver.drain()


@PROMISES.row(7, 10, mutants=("free_queue_skips_one",))
def test_a_fresh_pool_hands_out_its_blocks_in_ascending_order() -> None:
    """Design 1: 1, 2, 3 and so on; the queue counts what a walk finds."""
    driver = scene(usable=8)
    assert driver.scheduler.free_queue().tolist() == [1, 2, 3, 4, 5, 6, 7, 8]
    driver.submit(prompt(1, 12), max_tokens=2)
    plan = driver.plan()
    assert plan.block_tables[0, plan.seq_slots[0], :3].tolist() == [1, 2, 3]
    driver.commit(*driver.forward())
    driver.drain()


@PROMISES.row(11, mutants=("leak_block_on_finish",))
def test_all_blocks_are_free_again_after_a_chunked_prompt_and_a_long_answer() -> None:
    """Fault 11: one prompt of 5 in chunks of 4, 200 outputs; at idle free equals total."""
    driver = scene(long_prefill_threshold=4)
    request = driver.generate(prompt(1, 5), max_tokens=200)
    assert len(request.outputs) == 200
    driver.drain()


@PROMISES.row(13, mutants=("double_free", "short_slot", "leak_block_on_finish"))
def test_a_block_at_the_border_of_two_chunks_is_taken_once_and_released_once() -> None:
    """Fault 13: segments of 10 and 9 tokens share a block of 16; it goes when its last token goes."""
    driver = scene(block_size=16, long_prefill_threshold=10, enable_prefix_caching=False)
    driver.generate(prompt(2, 40), max_tokens=1)  # so that the next blocks to be taken do not lie side by side
    request = driver.submit(prompt(1, 19), max_tokens=3)
    used = []
    while request.end is None:
        driver.step()
        used.append(driver.scheduler.stats()["used_blocks"])
    assert used == [1, 2, 2, 0]
    driver.drain()
    driver = scene(block_size=16, long_prefill_threshold=10)
    whole, longer = (driver.submit(prompt(1, length), max_tokens=3) for length in (16, 19))
    driver.step()
    driver.step()
    driver.abort(whole)
    driver.drain()
    assert len(longer.outputs) == 3


@PROMISES.row(14, mutants=("ignore_promises", "blocked_keeps_hits"))
def test_an_admission_that_does_not_fit_takes_nothing() -> None:
    """Fault 14: rows, blocks and budget run out in turn; the request that waits holds nothing, its prefix stays where it is."""
    for changes in (
        {"max_num_seqs": 1},
        {"usable": 12},
        {"usable": 12, "long_prefill_threshold": 6},
        {"max_num_batched_tokens": 1},
    ):
        driver = scene(**({"usable": 40} | changes))
        driver.generate(prompt(2, 9), max_tokens=1)
        running = driver.submit(prompt(1, 30), max_tokens=15)
        waiting = driver.submit(prompt(2, 30), max_tokens=2)
        while running.end is None:
            plan = driver.plan()
            assert waiting.row is None
            assert plan.num_seqs == 1
            held = plan.block_tables[0, plan.seq_slots[0], : -(-int(plan.seq_lens[0]) // 4)].tolist()
            before = Snapshot.of(driver.scheduler)
            assert before.block_refs.sum() >= len(held)
            driver.fail()
            driver.plan()
            assert Snapshot.of(driver.scheduler).has_the_blocks_of(before)
            driver.commit(*driver.forward())
        driver.drain()


@PROMISES.row(16, mutants=("skip_ref_on_hit", "hit_keeps_in_queue"))
def test_holding_a_part_of_a_chain_keeps_that_part_and_nothing_else() -> None:
    """Fault 16: store ABCDEF, hold ABC, store ABCXYZ, let go, evict all: every block is free, and all of them were evicted."""
    driver = scene(usable=16, block_size=2)
    chain, other = prompt(1, 12), prompt(2, 6)
    driver.generate(chain, max_tokens=1)
    holder = driver.submit([*chain[:6], 5], max_tokens=30)
    driver.step()
    assert holder.cached == 6
    branch = driver.submit(chain[:6] + other, max_tokens=1)
    driver.step()
    assert branch.end is not None
    assert branch.cached == 6
    driver.abort(holder)
    assert len(driver.scheduler.published_blocks()) == 10, "ABCDEF and XYZ, and what the holder filled"
    driver.generate(prompt(3, 32), max_tokens=1)
    assert driver.generate(chain, max_tokens=1).cached == 0
    driver.drain()


@PROMISES.row(17, mutants=("skip_ref_on_hit",))
def test_two_blocks_of_equal_content_live_and_go_apart() -> None:
    """Fault 17: two requests compute one block each with equal content; the first ends and is evicted, the second goes on."""
    driver = scene(usable=6)
    same = prompt(1, 4)  # a whole block, of which the last token is always computed: no hit is possible
    first = driver.submit(same, max_tokens=1)
    second = driver.submit(same, max_tokens=9)
    driver.step()
    assert first.end is not None
    assert (first.cached, second.cached) == (0, 0)
    assert len(driver.scheduler.published_blocks()) == 2, "the control: both are published"
    third = driver.submit([*same, 7], max_tokens=2)
    driver.step()
    assert third.cached == 4
    driver.submit(prompt(2, 10), max_tokens=1)
    driver.run()
    assert second.outputs == second.answer.first(9)
    driver.drain()


@PROMISES.row(19, mutants=("preempt_equal", "preempt_self"))
def test_a_growth_that_does_not_fit_keeps_what_the_sequence_has() -> None:
    """Fault 19: the lowest in rank needs a block and none is free: it is passed over, keeps its blocks, and goes on later."""
    driver = scene(usable=6)
    high = driver.submit(prompt(1, 13), max_tokens=3)
    low = driver.submit(prompt(2, 8), max_tokens=5)
    driver.step()
    before = Snapshot.of(driver.scheduler)
    assert before.stats["free_blocks"] == 0
    plan = driver.plan()
    assert plan.seq_slots.tolist() == [high.row]
    after = Snapshot.of(driver.scheduler)
    assert after.has_the_blocks_of(before)
    driver.commit(*driver.forward())
    driver.run()
    assert (low.preempted, high.preempted) == (0, 0)
    assert len(low.outputs) == 5
    driver.drain()


@PROMISES.row(20, 73, mutants=("leak_block_on_finish", "abort_waiting_leaks"))
def test_two_thousand_short_requests_leave_nothing_behind() -> None:
    """Faults 20, 73: eight at a time, some of them aborted; whenever nobody lives, no block is used."""
    _soak(requests=2_000)


def _soak(requests: int) -> None:
    driver = scene(usable=24)
    driver.recounts = False  # the core's own audit is enough for so many calls
    for start in range(0, requests, 8):
        batch = [driver.submit(prompt(start + i, 3 + i), max_tokens=1 + i % 3) for i in range(8)]
        if start % 3 == 0:
            driver.abort(batch[start % 8])
        driver.step()
        if start % 5 == 0 and batch[7].end is None:
            driver.abort(batch[7])
        driver.run()
        assert driver.scheduler.stats()["used_blocks"] == 0
    driver.drain()


@PROMISES.row(22, mutants=("publish_at_plan", "publish_partial", "keep_pending_on_abort", "free_in_flight"))
def test_a_request_that_leaves_in_any_step_of_its_prefill_leaves_only_confirmed_content() -> None:
    """Faults 22, 68: abort before, during and after each of 6 chunks; the next users of the blocks are answered right."""
    for chunks_done in range(6):
        for moment in ("before", "in flight, then failed", "in flight, then committed"):
            _leave_prefill(chunks_done, moment)


def _leave_prefill(chunks_done: int, moment: str) -> None:
    driver: Driver = scene(usable=9, long_prefill_threshold=6)  # chunks end inside of blocks of 4
    leaver = driver.submit(prompt(1, 32), max_tokens=4)
    for _ in range(chunks_done):
        driver.step()
    confirmed = 6 * chunks_done
    if moment == "before":
        driver.abort(leaver)
    else:
        driver.plan()
        driver.abort(leaver)
        if moment.endswith("failed"):
            driver.fail()
        else:
            driver.commit(*driver.forward())
    again = driver.submit(prompt(1, 32), max_tokens=4)
    driver.run()
    assert again.cached is not None
    assert again.cached <= confirmed
    driver.generate(prompt(2, 30), max_tokens=2)
    driver.drain()


test_a_planted_fault_is_caught = PROMISES.test_of_mutants()
