"""The allocator kit on ours, on its plain model and on vLLM's; and on broken ones, each of which it must find."""

import os
import subprocess
from collections import Counter
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import pytest
from hypothesis import Phase, settings
from hypothesis.stateful import run_state_machine_as_test

import blocktable
from blocktable import _core
from blocktable.testing import (
    Allocator,
    BlocktableAllocator,
    Call,
    MakeAllocator,
    PlainAllocator,
    Watch,
    allocator_machine,
    find_bug,
    run_allocator_script,
)
from tests.faults.promises import is_panic
from tests.property.broken_allocators import BROKEN, Crashes, HitsOneBlock, KeepsNames, LosesBlocks, WritesInPlace

SCRIPTS = int(os.environ.get("BLOCKTABLE_CASES", "500")) // 5
MUST_HAPPEN = ("cached", "evicted", "refused", "fork", "truncate", "forget")
PEER = os.environ.get("BLOCKTABLE_PEER_PYTHON")

OursInParts = partial(BlocktableAllocator, finds_parts=True)
PlainInParts = partial(PlainAllocator, finds_parts=True)

TestOurs = allocator_machine(BlocktableAllocator, model=PlainAllocator).TestCase
TestPlain = allocator_machine(PlainAllocator).TestCase
TestOursInParts = allocator_machine(OursInParts, model=PlainInParts).TestCase
TestOurs.settings = settings(max_examples=60, stateful_step_count=30)
TestOursInParts.settings = settings(max_examples=60, stateful_step_count=30)
TestPlain.settings = settings(max_examples=30, stateful_step_count=30)


def test_ours_does_what_the_plain_model_does(seed: int) -> None:
    """Ids, order of the free queue, hits, evictions and refusals, after every call of random scripts."""
    check_scripts(range(seed, seed + SCRIPTS), BlocktableAllocator, PlainAllocator)


def test_ours_finds_the_parts_of_blocks_that_the_plain_model_finds(seed: int) -> None:
    whole = check_scripts(range(seed, seed + SCRIPTS), BlocktableAllocator, PlainAllocator)
    parts = check_scripts(range(seed, seed + SCRIPTS), OursInParts, PlainInParts)
    assert parts["cached"] > whole["cached"]


def check_scripts(seeds: range, make: MakeAllocator, model: MakeAllocator) -> Counter[str]:
    met: Counter[str] = Counter()
    for number in seeds:
        met += run_allocator_script(number, make, model=model)
    print(f"{len(seeds)} scripts, seeds {seeds[0]}..{seeds[-1]}: {dict(met)}")
    missing = [name for name in MUST_HAPPEN if not met[name]]
    assert not missing or len(seeds) < 200, f"never met: {missing}"
    return met


def test_ours_does_what_the_block_pool_of_vllm_does(seed: int) -> None:
    """The same scripts, block for block. Where vLLM is installed, in this interpreter or in the one that is named."""
    if find_spec("vllm") is not None:
        from blocktable.testing import VllmAllocator

        check_scripts(range(seed, seed + SCRIPTS), BlocktableAllocator, VllmAllocator)
        return
    if PEER is None:
        pytest.skip("needs vLLM 0.32: install it, or name an interpreter that has it in BLOCKTABLE_PEER_PYTHON")
    code = (
        "import sys; from blocktable.testing import *\n"
        f"for seed in range({seed}, {seed + SCRIPTS}): run_allocator_script(seed, BlocktableAllocator, model=VllmAllocator)\n"
        "print('the same in', seed - int(sys.argv[1]) + 1, 'scripts')"
    )
    environment = os.environ | {"PYTHONPATH": str(Path(blocktable.__file__).parents[1]), "VLLM_LOGGING_LEVEL": "ERROR"}
    done = subprocess.run(
        [PEER, "-c", code, str(seed)], capture_output=True, text=True, timeout=280, env=environment, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith(f"the same in {SCRIPTS} scripts\n")


@pytest.mark.parametrize("broken", BROKEN, ids=lambda broken: broken.__name__)
def test_a_broken_allocator_is_found_by_its_promise_in_a_few_calls(broken: type[PlainAllocator]) -> None:
    bug = find_bug(broken, model=PlainAllocator if BROKEN[broken] == "model" else None)
    assert bug is not None
    print(bug)
    assert bug.kind == BROKEN[broken]
    assert len(bug.calls) <= 7
    assert bug.num_blocks <= 4


def test_an_allocator_without_a_bug_has_none() -> None:
    assert find_bug(PlainAllocator, scripts=30) is None
    assert find_bug(BlocktableAllocator, model=PlainAllocator, scripts=30) is None
    assert find_bug(OursInParts, model=PlainInParts, scripts=30) is None


def test_a_bug_can_be_played_again() -> None:
    bug = find_bug(KeepsNames)
    assert bug is not None
    watch = Watch(KeepsNames(bug.num_blocks, bug.block_size))
    *before, last = bug.calls
    for call in before:
        call.on(watch)
    with pytest.raises(AssertionError) as caught:
        last.on(watch)
    assert str(caught.value) == str(bug.error)
    assert find_bug(KeepsNames) is not None
    assert str(find_bug(KeepsNames)) == str(bug)


def test_an_error_of_the_allocator_says_which_calls_led_to_it() -> None:
    watch = Watch(Crashes(4, 2))
    watch.match(0, [1])
    with pytest.raises(ZeroDivisionError) as caught:
        watch.fork(0, 1)
    assert caught.value.__notes__ == ["after match(0, [1]); fork(0, 1)"]


@pytest.mark.parametrize("broken", [KeepsNames, WritesInPlace, LosesBlocks, HitsOneBlock], ids=lambda broken: broken.__name__)
def test_the_machine_finds_a_broken_allocator(broken: type[PlainAllocator]) -> None:
    search = settings(max_examples=300, phases=(Phase.generate,), print_blob=False, report_multiple_bugs=False)
    with pytest.raises(AssertionError, match=f"{BROKEN[broken]}: "):
        run_state_machine_as_test(allocator_machine(broken), settings=search)


def test_a_script_is_the_same_for_the_same_seed() -> None:
    assert run_allocator_script(3, PlainAllocator) == run_allocator_script(3, PlainAllocator)
    assert run_allocator_script(3, PlainAllocator) != run_allocator_script(4, PlainAllocator)


def test_a_call_that_means_nothing_is_passed_over() -> None:
    watch = Watch(PlainAllocator(4, 2))
    for call in (
        Call("append", 5, (1,)),
        Call("publish", 5),
        Call("fork", 5, number=6),
        Call("release", 5),
        Call("truncate", 5),
    ):
        call.on(watch)
    assert watch.calls == []


def test_every_adapter_has_the_methods_of_the_protocol() -> None:
    from blocktable.testing import VllmAllocator

    wanted = {name for name in vars(Allocator) if not name.startswith("_")}
    for adapter in (PlainAllocator, BlocktableAllocator, VllmAllocator):
        assert wanted - {"num_blocks", "block_size"} <= set(dir(adapter))


FOUND = (
    "leak_block_on_finish", "lost_block", "one_way_link", "unpublished_to_tail", "skip_ref_on_hit", "free_queue_skips_one",
    "hit_keeps_in_queue", "keep_key_on_reuse", "hit_whole_prompt", "head_order", "forward_order", "key_without_parent",
    "orphan_entry", "write_in_place", "fork_misses_last", "truncate_keeps_block", "copy_keeps_holder",
)  # fmt: skip
"""Planted faults of the core that calls without the scheduler meet."""


@pytest.mark.mutant
@pytest.mark.parametrize("mutant", FOUND)
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_the_kit_finds_planted_faults_of_the_core(mutant: str) -> None:
    _core.set_mutant(mutant)
    try:
        bug = find_bug(BlocktableAllocator, model=PlainAllocator)
    except BaseException as error:
        if not is_panic(error):
            raise
        print(f"{mutant}: panic: {error}")
        return
    finally:
        _core.set_mutant(None)
    assert bug is not None, f"{mutant} is not noticed"
    print(bug)
    assert len(bug.calls) <= 8


FOUND_IN_PARTS = ("partial_first_only", "partial_keeps_forgotten", "partial_of_anybody", "tokens_not_compared")
"""Planted faults of the core that only matches which end inside a block can meet."""


@pytest.mark.mutant
@pytest.mark.parametrize("mutant", FOUND_IN_PARTS)
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_the_kit_finds_planted_faults_of_parts_of_blocks(mutant: str) -> None:
    _core.set_mutant(mutant)
    try:
        bug = find_bug(OursInParts, model=PlainInParts)
    except BaseException as error:
        if not is_panic(error):
            raise
        return
    finally:
        _core.set_mutant(None)
    assert bug is not None, f"{mutant} is not noticed"
