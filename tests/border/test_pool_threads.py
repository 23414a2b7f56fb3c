"""`BlockPool`, `BlockTable` and `PrefixCache` from many threads at once: refused at worst, never a panic, a borrow error or a
deadlock.

Field fault 139. Threads share one pool, one cache and some of their tables; what they leave behind is audited, and drains.
"""

import gc
import threading
from collections import Counter

import numpy as np
import pytest

from blocktable import BlockPool, BlockRef, BlockTable, BlocktableError, PrefixCache

THREADS = 12
CALLS = 1500
BY_ITSELF = {"reset"}
"""`BlockPool.reset` ends every table; it has a thread of its own in the last test."""


class Caller(threading.Thread):
    """Makes random calls; keeps what was refused, and what should never have been raised."""

    def __init__(self, pool: BlockPool, cache: PrefixCache, shared: list[BlockTable], seed: int) -> None:
        super().__init__(daemon=True)
        self.pool, self.cache, self.shared = pool, cache, shared
        self.rng = np.random.default_rng(seed)
        self.own = pool.table()
        self.single: list[int] = []
        self.done: Counter[str] = Counter()
        self.broken: list[BaseException] = []

    def run(self) -> None:
        calls = [name for name in dir(type(self)) if name.startswith("call_")]
        for _ in range(CALLS):
            name = calls[self.rng.integers(len(calls))]
            try:
                getattr(self, name)()
                self.done[name] += 1
            except BlocktableError:
                self.done["refused"] += 1
            except BaseException as error:
                self.broken.append(error)
                return
        self.call_release_single()
        self.own.release()

    def a_table(self) -> BlockTable:
        return self.own if self.rng.random() < 0.7 else self.shared[self.rng.integers(len(self.shared))]

    def tokens(self) -> np.ndarray:
        return self.rng.integers(0, 2, int(self.rng.integers(1, 40)))

    def call_match(self):
        tokens = self.tokens()
        with self.cache.match(tokens, reserve=len(tokens))[0] as table:
            table.append(len(tokens) - table.num_tokens)
            self.cache.publish(table, tokens)

    def call_match_and_forget(self):
        self.cache.match(self.tokens())

    def call_append(self):
        self.a_table().append(int(self.rng.integers(0, 9)))

    def call_reserve(self):
        self.a_table().reserve(int(self.rng.integers(0, 40)))

    def call_truncate(self):
        table = self.a_table()
        table.truncate(int(self.rng.integers(0, table.num_tokens + 1)))

    def call_fork(self):
        child = self.a_table().fork()
        child.append(3)

    def call_slots(self):
        table = self.a_table()
        assert len(table.slots(0, min(2, table.num_tokens))) <= 2

    def call_publish(self):
        table = self.a_table()
        self.cache.publish(table, [])

    def call_release_twice(self):
        table = self.pool.table()
        table.release()
        table.release()

    def call_take(self):
        self.single += self.pool.take(int(self.rng.integers(0, 4))).tolist()

    def call_take_ref(self):
        with self.pool.take_ref() as ref, ref.share() as other:
            assert (other.block, other.is_released) == (ref.block, False)
            self.kept = other.share()

    def call_keep(self):
        table, _ = self.cache.match(self.tokens())
        table.append(8)
        self.cache.publish(table, [3] * 8, start=0, retention=[(0, None, int(self.rng.integers(0, 101)), 1)])

    def call_tell_time(self):
        self.pool.tell_time(int(self.rng.integers(0, 10_000)))

    def call_share(self):
        self.pool.share(self.single[:1])
        self.single += self.single[:1]

    def call_release_single(self):
        self.pool.release(self.single)
        self.single = []

    def call_foreign(self):
        self.cache.publish(BlockPool(4, 4).table(), [])

    def call_read(self):
        pool, table = self.pool, self.a_table()
        pool.stats(), pool.free_queue(), pool.block_refs(), pool.published_blocks(), pool.num_free, pool.num_blocks, repr(pool)
        pool.read_events(0), pool.event_snapshot()
        table.blocks, table.num_blocks, table.num_published, table.is_released, table.pool, repr(table), self.cache.pool

    def call_audit(self):
        if self.rng.random() < 0.2:
            self.pool.audit()

    def call_forget(self):
        if self.rng.random() < 0.1:
            self.cache.reset()


def run_together(seed: int) -> tuple[BlockPool, list[Caller], list[BlockTable]]:
    pool = BlockPool(200, 4, event_buffer_size=64)
    cache = PrefixCache(pool)
    shared = [pool.table() for _ in range(4)]
    callers = [Caller(pool, cache, shared, seed + number) for number in range(THREADS)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join(timeout=100)
    assert not [caller for caller in callers if caller.is_alive()], "a thread hangs"
    return pool, callers, shared


@pytest.mark.timeout(200)
def test_twelve_threads_calling_every_method_break_nothing(seed):
    pool, callers, shared = run_together(seed)
    assert [error for caller in callers for error in caller.broken] == []
    done = sum((caller.done for caller in callers), Counter())
    always_refused = {"call_release_twice", "call_foreign"}
    assert {name for name in dir(Caller) if name.startswith("call_")} - always_refused <= set(done), "some never succeeded"
    assert not always_refused & set(done)
    pool.audit()
    for table in shared:
        table.release()
    callers.clear()
    gc.collect()
    pool.audit()
    assert (pool.num_free, pool.stats()["tables"]) == (199, 0)


def test_every_method_is_called_by_the_threads():
    """A new method that nobody adds to the callers is found here."""
    names = {name for name in dir(BlockPool) + dir(BlockRef) + dir(BlockTable) + dir(PrefixCache) if not name.startswith("_")}
    assert names - {"block_size"} - BY_ITSELF == {
        "match", "publish", "append", "reserve", "truncate", "fork", "slots", "release", "take", "share", "table", "stats",
        "free_queue", "block_refs", "published_blocks", "num_free", "num_blocks", "blocks", "num_published", "num_tokens",
        "is_released", "pool", "audit", "take_ref", "block", "tell_time", "read_events", "event_snapshot",
    }  # fmt: skip


def test_a_pool_that_is_reset_under_its_users_refuses_them():
    pool = BlockPool(50, 4)
    stop = threading.Event()
    refused: Counter[str] = Counter()
    broken: list[BaseException] = []

    def use() -> None:
        try:
            while not stop.is_set():
                table = pool.table()
                try:
                    table.append(5)
                    table.fork().append(1)
                    table.release()
                except BlocktableError as error:
                    refused[type(error).__name__] += 1
        except BaseException as error:
            broken.append(error)

    users = [threading.Thread(target=use, daemon=True) for _ in range(4)]
    for user in users:
        user.start()
    for _ in range(300):
        pool.reset()
        pool.audit()
    stop.set()
    for user in users:
        user.join(timeout=60)
    assert broken == []
    assert set(refused) <= {"ReleasedError", "OutOfBlocksError"}
    gc.collect()
    pool.audit()
    assert pool.num_free == 49


def test_a_long_match_does_not_stop_other_threads():
    """Hashing a long prompt lets go of the interpreter (field fault 140)."""
    from tests.border.test_threads import lets_others_run

    pool = BlockPool(100, 16)
    cache = PrefixCache(pool)
    prompt = np.random.default_rng(0).integers(0, 32_000, 3_000_000)
    assert lets_others_run(lambda: cache.match(prompt))


def test_ten_thousand_tables_leave_nothing_behind():
    """No record is kept of a table that is gone: the seats are used again."""
    pool = BlockPool(100, 4)
    cache = PrefixCache(pool)
    for number in range(10_000):
        tokens = [number % 7] * 9
        table, cached = cache.match(tokens)
        table.append(9 - cached)
        cache.publish(table, tokens)
        if number % 3 == 0:
            table.release()
    del table
    gc.collect()
    assert (pool.num_free, pool.stats()["tables"]) == (99, 0)
    pool.audit()
