"""Prefix reuse (catalogue 23 to 38): a hit is what it says, is held, is confirmed, and at least one token is computed."""

import numpy as np

from blocktable import _core
from blocktable.testing import Driver
from tests.faults.planted import ResetForgetsNothing
from tests.faults.promises import Promises
from tests.faults.scene import prompt, scene

PROMISES = Promises()


@PROMISES.row(23, mutants=("hit_keeps_in_queue", "skip_ref_on_hit"))
def test_a_hit_is_held_from_the_call_that_found_it() -> None:
    """Fault 23: R finds two free blocks; B, admitted in the same plan, wants every other one and gets none of R's."""
    driver = scene(usable=8, estimate_growth=False)
    driver.generate(prompt(1, 9), max_tokens=1)
    finder = driver.submit(prompt(1, 12), max_tokens=4)
    taker = driver.submit(prompt(2, 16), max_tokens=4)
    driver.plan()
    assert finder.cached == 8
    assert taker.row is not None
    refs = driver.scheduler.block_refs()
    assert (refs > 0).sum() == 3 + 4, "no block serves both"
    driver.commit(*driver.forward())
    driver.drain()


@PROMISES.row(25, mutants=("hit_whole_prompt",))
def test_a_prompt_that_is_cached_as_a_whole_still_computes_its_last_token() -> None:
    """Fault 25: lengths around multiples of the block, each sent three times; the third finds as much as the second."""
    for length in (15, 16, 17, 32, 33):
        driver = scene(block_size=16)
        cached, computed = [], []
        for _ in range(3):
            request = driver.generate(prompt(1, length), max_tokens=3)
            assert request.outputs == request.answer.first(3)
            cached.append(request.cached)
            computed.append(request.computed)
        full_blocks = 16 * ((length - 1) // 16)
        assert cached == [0, full_blocks, full_blocks]
        assert computed == [length + 2, length - full_blocks + 2, length - full_blocks + 2]
        driver.drain()


@PROMISES.row(26, mutants=("budget_before_hit",))
def test_the_first_chunk_after_a_hit_is_what_is_left_of_the_prompt() -> None:
    """Fault 26: prompt 465, block 256, first 256 cached, budget 512 or 300: 209 are scheduled, and they end where it ends."""
    for budget in (512, 300):
        driver = scene(block_size=256, usable=8, max_num_batched_tokens=budget)
        driver.generate(prompt(1, 257), max_tokens=1)
        request = driver.submit(prompt(1, 465), max_tokens=2)
        plan = driver.plan()
        assert request.cached == 256
        assert plan.num_tokens == 209
        assert (plan.positions[0], plan.positions[-1], plan.seq_lens[0]) == (256, 464, 465)
        driver.commit(*driver.forward())
        driver.drain()


@PROMISES.row(29, mutants=("publish_at_plan", "publish_partial", "keep_pending_on_abort"))
def test_a_prefill_that_was_broken_off_serves_only_what_was_computed() -> None:
    """Fault 29: cancelled in the second of 6 chunks; B computes over the freed blocks; the first prompt comes again."""
    for confirm in (False, True):
        driver = scene(usable=16, long_prefill_threshold=6)  # chunks end inside of blocks of 4
        first = driver.submit(prompt(1, 32), max_tokens=2)
        driver.step()
        driver.plan()
        if confirm:
            driver.commit(*driver.forward())
            driver.abort(first)
        else:
            driver.abort(first)
            driver.fail()
        other = driver.generate(prompt(2, 24), max_tokens=2)
        assert other.cached == 0
        again = driver.generate(prompt(1, 32), max_tokens=4)
        assert again.cached == (12 if confirm else 4)
        driver.drain()


@PROMISES.row(29, mutants=("sharer_not_reset", "keep_pending_on_fail"))
def test_who_shared_a_block_that_was_never_written_computes_it_anew() -> None:
    """Design 6: equal prompts in one plan share the blocks that it writes; it fails, or the writer leaves and it fails."""
    for writer_leaves in (False, True):
        driver = scene(block_size=4)
        requests = [driver.submit([*prompt(1, 12), number], max_tokens=4) for number in range(4)]
        plan = driver.plan()
        assert plan.num_tokens == 12 + 4, "the control: the prefix is computed once"
        if writer_leaves:
            driver.abort(requests[0])
        driver.fail()
        driver.run()
        assert all(request.outputs == request.answer.first(4) for request in requests[writer_leaves:])
        driver.drain()


@PROMISES.row(29, mutants=("sharer_not_reset", "apply_stale_result"))
def test_who_shared_a_block_whose_writer_left_in_flight_computes_it_anew() -> None:
    """Design 6: the writer is aborted in flight; sharers go back to what was published, and what comes back is dropped."""
    driver = scene(block_size=4)
    writer = driver.submit([*prompt(1, 12), 1], max_tokens=4)
    sharers = [driver.submit([*prompt(1, 12), 2 + number], max_tokens=4) for number in range(3)]
    driver.plan()
    driver.abort(writer)
    assert driver.commit(*driver.forward()).num_accepted == 0
    driver.run()
    assert all(request.outputs == request.answer.first(4) for request in sharers)
    driver.drain()


@PROMISES.row(31, mutants=("stale_hit",))
def test_the_hit_of_a_request_that_waited_is_read_again_at_its_admission() -> None:
    """Fault 31: R sees four cached blocks and does not fit; they are evicted while it waits; it is admitted without them."""
    driver = scene(usable=8)
    driver.generate(prompt(1, 17), max_tokens=1)
    running = driver.submit(prompt(2, 16), max_tokens=16)
    driver.step()
    waiting = driver.submit(prompt(1, 20), max_tokens=4)
    while running.end is None:
        driver.step()
        assert waiting.row is None or running.end is not None
    driver.run()
    assert waiting.cached == 0
    assert waiting.outputs == waiting.answer.first(4)
    driver.drain()


@PROMISES.row(32, mutants=("keep_key_on_reuse",))
def test_a_block_taken_for_new_content_has_no_key() -> None:
    """Fault 32, the part of one geometry: what is written by a plan was published by nobody."""
    driver = scene(usable=6)
    for number in range(8):
        driver.submit(prompt(number, 12), max_tokens=2)
        while driver.live:
            plan = driver.plan()
            if plan.num_seqs == 0:
                continue
            written = np.unique(plan.slot_mapping[0] // 4)
            assert not np.isin(written, driver.scheduler.published_blocks()).any()
            driver.commit(*driver.forward())
    driver.drain()


@PROMISES.row(34, mutants=("key_without_parent", "publish_partial"))
def test_only_whole_prefixes_are_reused() -> None:
    """Fault 34: cached ab cd ef gh j, new ab ef hj: the first block is found; ef is not, though its tokens are cached."""
    driver = scene(block_size=2, long_prefill_threshold=3)
    a, b, c, d, e, f, g, h, j = prompt(1, 9)
    driver.generate([a, b, c, d, e, f, g, h, j], max_tokens=3)
    shifted = driver.generate([a, b, e, f, h, j], max_tokens=3)
    assert shifted.cached == 2
    grown = driver.generate([a, b, c, d, e, f, g, h, j, j, j], max_tokens=3)
    assert grown.cached == 8
    driver.drain()


@PROMISES.row(35, mutants=("publish_partial", "keep_key_on_reuse", "skip_ref_on_hit"))
def test_the_same_prompt_ten_times_gets_the_same_answer() -> None:
    """Fault 35: with unrelated prompts between, caching on and off, in a pool in which they evict each other."""
    for caching in (True, False):
        driver = scene(usable=9, enable_prefix_caching=caching, long_prefill_threshold=7)
        outputs = []
        for number in range(10):
            outputs.append(driver.generate(prompt(1, 15), max_tokens=6).outputs)
            driver.generate(prompt(2 + number, 3 + 3 * (number % 9)), max_tokens=5)
        assert outputs == [outputs[0]] * 10
        driver.drain()


def _answers_after_a_swap(driver: Driver) -> None:
    before = driver.generate(prompt(1, 17), max_tokens=3)
    assert driver.generate(prompt(1, 17), max_tokens=3).cached == 16, "the control"
    driver.oracle.identity = 2
    assert driver.reset_prefix_cache() == len(before.prompt) // 4
    after = driver.generate(prompt(1, 17), max_tokens=3)
    assert after.cached == 0
    assert after.outputs != before.outputs


@PROMISES.row(37, planted=(ResetForgetsNothing,))
def test_after_a_reset_nothing_of_the_old_weights_is_found() -> None:
    """Fault 37: weights are swapped and the cache is reset at idle; nothing is found, answers are those of the new weights."""
    driver = scene()
    _answers_after_a_swap(driver)
    driver.drain()


@PROMISES.row(mutants=("no_prefix_wait",))
def test_eight_equal_cold_prompts_are_computed_once() -> None:
    """Design 6: 8 prompts of 1,009 tokens in flight together cost 1,009 + 7 prompt tokens, with any budget and any chunks."""
    for budget, threshold in ((2_048, 0), (64, 0), (64, 24)):
        driver = scene(
            usable=600, block_size=16, max_model_len=1_024, max_num_batched_tokens=budget, long_prefill_threshold=threshold
        )
        requests = [driver.submit(prompt(1, 1_009), max_tokens=1) for _ in range(8)]
        driver.run()
        assert driver.scheduler.stats()["scheduled_tokens"] == 1_009 + 7
        assert [request.cached for request in requests] == [0] + [1_008] * 7
        driver.drain()


@PROMISES.row(29, mutants=("keep_pending_on_fail", "no_rollback_on_fail"))
def test_a_failed_step_publishes_nothing_and_counts_nothing_as_computed() -> None:
    """Design 6: what a failed step would have written is computed again, and nobody else can find it."""
    driver = scene()
    request = driver.submit(prompt(1, 16), max_tokens=3)
    driver.plan()
    driver.fail()
    assert len(driver.scheduler.published_blocks()) == 0
    plan = driver.plan()
    assert (plan.num_tokens, plan.positions[0]) == (16, 0)
    driver.commit(*driver.forward())
    assert len(driver.scheduler.published_blocks()) == 4
    driver.run()
    assert request.end == _core.END_FINISHED_LENGTH
    driver.drain()


test_a_planted_fault_is_caught = PROMISES.test_of_mutants()
test_a_fault_at_the_border_is_caught = PROMISES.test_of_planted()
