"""Promise: what entered a scheduler can be recorded, and another process makes the same plans from the file, bit for bit; a
crash report holds the call that broke the scheduler."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from blocktable import Commit, InvalidInputError, Plan, Scheduler, _core
from blocktable.errors import RecordingError
from blocktable.replay import ReplayDifferenceError, describe, replay, replayed

from .conftest import MakeScheduler

Answer = Callable[[Scheduler, Plan], Commit]
Record = Callable[[Scheduler], None]

EVERY_METHOD = (
    "submit set_retention fork truncate pin unpin abort finish reset_prefix_cache set_weights_version plan commit fail"
)


def busy(make_scheduler: MakeScheduler, answer: Answer, record: Record) -> Scheduler:
    """A scheduler whose every method was called, recorded as `record` says."""
    scheduler = make_scheduler(num_blocks=12, pin_budget=4, enable_partial_hits=True, explain_misses=True)
    record(scheduler)
    shared = list(range(10))
    first = scheduler.submit(shared, max_tokens=9, now_us=5, retention=[(0, None, 80, 1000)])
    scheduler.submit([*shared, 11], max_tokens=3, domain="tenant", public_tokens=8, cache_salt="secret", now_us=6)
    with pytest.raises(InvalidInputError):
        scheduler.submit([1], max_tokens=0)
    answer(scheduler, scheduler.plan(10))
    child = scheduler.fork(first, max_tokens=6, now_us=11)
    plan = scheduler.plan(12)
    scheduler.fail(plan.step)
    answer(scheduler, scheduler.plan(13))
    scheduler.truncate(first, 9)
    pin, _ = scheduler.pin(shared)
    answer(scheduler, scheduler.plan(14))
    assert scheduler.abort(child)
    scheduler.unpin(pin)
    scheduler.set_weights_version("2")
    last = scheduler.submit([7] * 5, max_tokens=50, now_us=20)
    while (plan := scheduler.plan(30)).num_seqs and plan.step < 12:
        answer(scheduler, plan)
    scheduler.fail(plan.step)
    assert scheduler.finish(last)
    scheduler.reset_prefix_cache()
    return scheduler


def test_another_process_replays_the_file(make_scheduler: MakeScheduler, answer: Answer, tmp_path: Path) -> None:
    path = tmp_path / "schedule.btrec"
    scheduler = busy(make_scheduler, answer, lambda scheduler: scheduler.start_recording(str(path)))
    calls = scheduler.stop_recording()
    assert calls is not None
    assert calls > 20
    assert path.stat().st_mode & 0o777 == 0o600
    command = [sys.executable, "-m", "blocktable", "replay", str(path)]
    told = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (told.returncode, told.stderr) == (0, "")
    assert told.stdout.startswith(f"{calls} calls, {scheduler.stats()['steps']} plans, ")
    assert told.stdout.endswith("the same, bit for bit\n")
    assert {line.split()[1] for line in describe(path)} == set(EVERY_METHOD.split())


def test_a_fork_of_the_process_writes_nothing_to_the_file(tmp_path: Path) -> None:
    path = tmp_path / "file"
    code = f"""
import os
from blocktable import Scheduler

scheduler = Scheduler(num_blocks=8, block_size=4, vocab_size=10, max_model_len=16)
scheduler.start_recording({str(path)!r})
scheduler.submit([1, 2, 3], max_tokens=2)
child = os.fork()
if child == 0:
    scheduler.plan(0)
    del scheduler
    os._exit(0)
os.waitpid(child, 0)
scheduler.plan(0)
print(scheduler.stop_recording())
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout == "2\n", done.stderr
    assert replayed(path).calls == 2
    assert replayed(path).difference is None


def test_a_ring_keeps_the_same_and_nothing_is_kept_without(make_scheduler: MakeScheduler, answer: Answer) -> None:
    scheduler = busy(make_scheduler, answer, lambda scheduler: scheduler.keep_recording(1 << 20))
    content = scheduler.recorded()
    assert content is not None
    assert replayed(content).plans == scheduler.stats()["steps"]
    assert busy(make_scheduler, answer, lambda scheduler: None).recorded() is None


def test_a_ring_that_lost_its_beginning_is_read_and_not_replayed(make_scheduler: MakeScheduler, answer: Answer) -> None:
    scheduler = busy(make_scheduler, answer, lambda scheduler: scheduler.keep_recording(600))
    content = scheduler.recorded()
    assert content is not None
    assert describe(content)[-1].endswith("reset_prefix_cache")
    with pytest.raises(InvalidInputError, match="a replay needs all from 1 on"):
        replay(content)


def test_what_cannot_be_recorded_or_replayed_is_refused(make_scheduler: MakeScheduler, tmp_path: Path) -> None:
    scheduler = make_scheduler()
    with pytest.raises(RecordingError):
        scheduler.start_recording(str(tmp_path / "no folder" / "file"))
    path = tmp_path / "file"
    scheduler.start_recording(str(path))
    with pytest.raises(RecordingError):
        make_scheduler().start_recording(str(path))
    assert scheduler.stop_recording() == 0
    assert scheduler.stop_recording() is None
    assert replayed(path).calls == 0
    scheduler.plan(0)
    with pytest.raises(InvalidInputError, match="begins at the start"):
        scheduler.keep_recording(100)
    for content in (b"", b"BTRECORD", path.read_bytes()[:-1], bytes([*path.read_bytes()[:20], 9, *path.read_bytes()[21:]])):
        with pytest.raises(InvalidInputError):
            replay(content)


def test_a_ring_for_which_there_is_no_memory_is_refused() -> None:
    code = """
import resource
from blocktable import InvalidInputError, Scheduler

resource.setrlimit(resource.RLIMIT_AS, (3 << 30, 3 << 30))
scheduler = Scheduler(num_blocks=8, block_size=4, vocab_size=10, max_model_len=16)
try:
    scheduler.keep_recording(2**32 - 1)
except InvalidInputError as error:
    print(error.field, error.value)
print(scheduler.recorded())
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout.split() == ["num_bytes", str(2**32 - 1), "None"], done.stderr


@pytest.mark.mutant
@pytest.mark.parametrize("fault", ["unrecorded_decision", "recorder_forgets_abort"])
def test_a_replay_that_goes_another_way_says_where(fault: str, make_scheduler: MakeScheduler, answer: Answer) -> None:
    _core.set_mutant(fault)
    try:
        scheduler = busy(make_scheduler, answer, lambda scheduler: scheduler.keep_recording(1 << 20))
        content = scheduler.recorded()
        assert content is not None
        with pytest.raises(ReplayDifferenceError, match=r"record \d+, \w+ after \d+ plans: \w+ is not what was recorded"):
            replayed(content)
    finally:
        _core.set_mutant(None)


def test_a_recording_costs_no_decision(make_scheduler: MakeScheduler, answer: Answer) -> None:
    with_one = busy(make_scheduler, answer, lambda scheduler: scheduler.keep_recording(1 << 20))
    without = busy(make_scheduler, answer, lambda scheduler: None)
    assert with_one.stats() == without.stats()
    np.testing.assert_array_equal(with_one.free_queue(), without.free_queue())
