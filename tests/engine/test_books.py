"""Promise: the parts that the step loop keeps its books with are right on their own: outputs, times, prompts, options."""

import dataclasses

import numpy as np
import pytest

from blocktable import EngineConfig, InvalidInputError, UnknownOptionError
from blocktable.engine.output_rows import FIRST_COLUMNS, NO_OUTPUTS, OutputRows
from blocktable.engine.report import RING_STEPS, StepTimes, make_report
from blocktable.engine.request import read_prompts


def test_rows_hold_what_was_appended_however_long() -> None:
    """Against plain lists: random appends, and rows that close and open again."""
    draw = np.random.default_rng(5)
    rows, lists, firsts = OutputRows(6), [[] for _ in range(6)], [0] * 6
    for now in range(1, 5 * FIRST_COLUMNS):
        chosen = np.flatnonzero(draw.random(6) < 0.7).astype(np.int32)
        ids = draw.integers(0, 1000, len(chosen))
        assert rows.positions(chosen).tolist() == [len(lists[row]) for row in chosen]
        rows.append(chosen, ids, now)
        for row, token in zip(chosen.tolist(), ids.tolist()):
            firsts[row] = firsts[row] if lists[row] else now
            lists[row].append(token)
        if now % 40 == 0:
            left, right = draw.permutation(6)[:2].tolist()  # one moves to the row of another, which ends
            saved = rows.read(left)
            rows.close(right)
            rows.close(left)
            rows.open(right, saved)
            rows.open(left, NO_OUTPUTS)
            lists[right], lists[left] = lists[left], []
            firsts[right] = firsts[left]
        for row in range(6):
            read = rows.read(row)
            assert read.token_ids.tolist() == lists[row]
            assert not lists[row] or read.first_ns == firsts[row]


def test_a_row_that_was_read_does_not_change_any_more() -> None:
    rows = OutputRows(1)
    rows.append(np.array([0]), np.array([4]), 1)
    read = rows.read(0)
    rows.close(0)
    rows.append(np.array([0]), np.array([9]), 2)
    assert read.token_ids.tolist() == [4]


def test_times_are_of_the_last_steps() -> None:
    times = StepTimes()
    assert (times.plan_us(50), times.commit_us(99)) == (0.0, 0.0)
    for _ in range(RING_STEPS):
        times.add(1_000_000, 1)
    for step in range(RING_STEPS):
        times.add(1000 * (step % 101), 5000)
    assert times.plan_us(50) == pytest.approx(50, abs=1)
    assert times.plan_us(99) == pytest.approx(99, abs=1)
    assert times.commit_us(99) == 5.0


def test_a_report_of_nothing_has_no_figures_to_divide_by() -> None:
    names = ("num_blocks", "peak_blocks", "used_blocks", "wasted_rows_sum", "taken_rows_sum", "prefix_hits", "prefix_queries")
    stats = dict.fromkeys([*names, "preemptions", "steps", "failed_steps"], 0)
    report = make_report(stats, StepTimes(), block_size=16, bytes_per_block=1)
    assert (report.wasted_rows_percent, report.prefix_hit_percent) == (0.0, 0.0)
    assert "0 in all" in str(report)


def test_options_are_one_frozen_record() -> None:
    config = EngineConfig.from_options({"model": "m", "block_size": 7})
    assert (config.block_size, config.max_num_seqs) == (7, 256)
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.block_size = 8  # type: ignore[misc]
    with pytest.raises(UnknownOptionError, match="max_num_seqs"):
        EngineConfig.from_options({"max_num_seq": 5})
    with pytest.raises(UnknownOptionError) as caught:
        EngineConfig.from_options({"gpu_memory_utilization": 0.5})
    assert caught.value.__notes__ == ["here it is called memory_share"]


def test_ids_of_every_kind_become_the_same_prompt() -> None:
    kinds = [[1, 2], (1, 2), range(1, 3), np.array([1, 2], np.uint8), np.array([1, 2]), [np.int64(1), np.int32(2)]]
    for ids in kinds:
        (prompt,) = read_prompts({"prompt_token_ids": ids}, encoder=None, vocab_size=3)
        assert prompt.token_ids == [1, 2]
        assert prompt.array.dtype == np.int32
        assert prompt.array.flags.c_contiguous
    strided = np.arange(10, dtype=np.int32)[1:6:3]
    assert read_prompts([{"prompt_token_ids": strided}], encoder=None, vocab_size=10)[0].array.flags.c_contiguous


def test_a_prompt_without_a_tokenizer_must_be_ids() -> None:
    with pytest.raises(InvalidInputError, match="prompt_token_ids"):
        read_prompts("hello", encoder=None, vocab_size=3)
