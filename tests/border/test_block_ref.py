"""`BlockRef` holds one block until its release, which comes once; it cannot be copied, and is refused after its end."""

import copy
import gc
import pickle
import threading

import pytest

from blocktable import AuditError, BlockPool, BlockRef, OutOfBlocksError, ReleasedError, _core


@pytest.fixture
def pool() -> BlockPool:
    """Three usable blocks of 4 tokens."""
    return BlockPool(4, 4)


def check_release(pool: BlockPool) -> None:
    ref = pool.take_ref()
    assert (ref.block, pool.num_free, ref.is_released, ref.pool is pool) == (1, 2, False, True)
    assert repr(ref) == "BlockRef(block=1)"
    ref.release()
    assert (pool.num_free, ref.is_released, repr(ref)) == (3, True, "BlockRef(released)")
    pool.audit()


def check_use_after_release(pool: BlockPool) -> None:
    ref = pool.take_ref()
    kept = ref.share()
    ref.release()
    for use in (ref.release, ref.share, lambda: ref.block):
        with pytest.raises(ReleasedError):
            use()
    assert pool.block_refs().tolist() == [0, 1, 0, 0], "the other guard holds it still"
    assert kept.block == 1
    pool.audit()


def check_share(pool: BlockPool) -> None:
    first = pool.take_ref()
    second = first.share()
    assert (second.block, pool.block_refs()[1]) == (first.block, 2)
    first.release()
    assert pool.num_free == 2
    second.release()
    assert pool.num_free == 3
    pool.audit()


def check_ends(pool: BlockPool) -> None:
    with pool.take_ref() as ref:
        assert pool.num_free == 2
    assert pool.num_free == 3
    assert ref.is_released
    with pool.take_ref() as early:
        early.release()
    dropped = pool.take_ref()
    assert pool.num_free == 2
    del dropped
    gc.collect()
    assert pool.num_free == 3
    pool.audit()


@pytest.mark.parametrize("check", [check_release, check_use_after_release, check_share, check_ends])
def test_a_guard_gives_its_block_back_once(check, pool):
    check(pool)


def test_nothing_is_taken_where_nothing_is_free(pool):
    refs = [pool.take_ref() for _ in range(3)]
    with pytest.raises(OutOfBlocksError) as refused:
        pool.take_ref()
    assert (refused.value.needed, refused.value.free) == (1, 0)
    assert [ref.block for ref in refs] == [1, 2, 3]
    pool.audit()


def test_a_guard_cannot_be_copied(pool):
    ref = pool.take_ref()
    for make in (copy.copy, copy.deepcopy, pickle.dumps, lambda _: BlockRef()):
        with pytest.raises((TypeError, pickle.PicklingError)):
            make(ref)
    assert pool.num_free == 2


def test_guards_tables_and_single_blocks_do_not_touch_each_other(pool):
    table = pool.table()
    table.append(1)
    single = pool.take(1)
    ref = pool.take_ref()
    pool.release(single)
    with pytest.raises(Exception, match="not held"):
        pool.release([ref.block])
    table.release()
    assert pool.block_refs().tolist() == [0, 0, 0, 1]


def test_a_reset_ends_every_guard(pool):
    ref = pool.take_ref()
    pool.reset()
    with pytest.raises(ReleasedError):
        ref.share()
    again = pool.take_ref()
    del ref
    gc.collect()
    assert (again.block, pool.num_free) == (1, 2)
    pool.audit()


def test_guards_on_many_threads_give_everything_back():
    pool = BlockPool(40, 4)
    broken: list[BaseException] = []

    def use() -> None:
        try:
            for _ in range(300):
                with pool.take_ref() as ref, ref.share() as other:
                    assert other.block == ref.block
                    handed = other.share()
                threading.Thread(target=handed.release).start()
        except BaseException as error:
            broken.append(error)

    users = [threading.Thread(target=use, daemon=True) for _ in range(6)]
    for user in users:
        user.start()
    for user in users:
        user.join(timeout=60)
    for thread in threading.enumerate():
        if thread is not threading.current_thread():
            thread.join(timeout=60)
    assert broken == []
    assert pool.num_free == 39
    pool.audit()


FAULTS = {
    "release_keeps_seat": check_use_after_release,
    "leak_block_on_finish": check_release,
    "double_free": check_use_after_release,
    "fork_misses_last": check_share,
}


@pytest.mark.mutant
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_noticed(fault, pool):
    _core.set_mutant(fault)
    try:
        with pytest.raises((AssertionError, AuditError, ReleasedError, pytest.fail.Exception)):
            FAULTS[fault](pool)
    finally:
        _core.set_mutant(None)
