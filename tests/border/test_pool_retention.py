"""`PrefixCache.publish` takes retention: free blocks go by priority, then recency; what `tell_time` is told ends it."""

import pytest

from blocktable import BlockPool, InvalidInputError, PrefixCache, _core
from blocktable.retention import KvCacheRetentionConfig, TokenRangeRetentionConfig

PROMPT = list(range(9))
OTHER = list(range(50, 59))


class Shelf:
    """14 usable blocks of 4 tokens; every prompt takes three of them, and two stay findable."""

    def __init__(self) -> None:
        self.pool = BlockPool(15, 4)
        self.cache = PrefixCache(self.pool)
        self.flooded = 0

    def run(self, prompt: list[int], retention=()) -> int:
        """Cached tokens of a prompt that is computed and given back."""
        table, cached = self.cache.match(prompt)
        with table:
            table.append(len(prompt) - cached)
            self.cache.publish(table, prompt, retention=retention)
        self.pool.audit()
        return cached

    def flood(self) -> None:
        for _ in range(60):
            self.flooded += 1
            self.run([1000 + self.flooded] * 9)


@pytest.fixture
def shelf() -> Shelf:
    return Shelf()


def kept(priority: int, duration_ms: int | None = None, end: int | None = None) -> list:
    return KvCacheRetentionConfig([TokenRangeRetentionConfig(0, end, priority, duration_ms)]).ranges(9)


def check_priority(shelf: Shelf) -> None:
    shelf.run(PROMPT, kept(80))
    shelf.run(OTHER)
    assert shelf.run(PROMPT) == 8, "a hit by who asks for nothing takes nothing away"
    shelf.flood()
    assert shelf.run(PROMPT) == 8
    assert shelf.run(OTHER) == 0


def check_time(shelf: Shelf) -> None:
    shelf.pool.tell_time(1_000_000)
    shelf.run(PROMPT, kept(80, duration_ms=100))
    shelf.pool.tell_time(1_090_000)
    assert shelf.run(PROMPT) == 8
    shelf.pool.tell_time(1_180_000)
    shelf.flood()
    assert shelf.run(PROMPT) == 8, "the hit began its time anew"
    shelf.pool.tell_time(1_300_000)
    shelf.flood()
    assert shelf.run(PROMPT) == 0


def check_chain(shelf: Shelf) -> None:
    """Who asks for a later block keeps those before it, published without and asked less for."""
    long = list(range(17))
    table, _ = shelf.cache.match(long)
    with table:
        table.append(17)
        shelf.cache.publish(table, long[:8])
        shelf.cache.publish(table, long[8:], start=8, retention=[(0, 8, 10, None), (8, 16, 80, None)])
    shelf.flood()
    assert shelf.run(long) == 16


def check_content(shelf: Shelf) -> None:
    """What is written over is forgotten with its worth."""
    shelf.run(PROMPT, kept(80))
    everything = shelf.pool.take(14)
    shelf.pool.release(everything)
    shelf.run(OTHER)
    shelf.flood()
    assert shelf.run(OTHER) == 0


@pytest.mark.parametrize("check", [check_priority, check_time, check_chain, check_content])
def test_retention_decides_what_is_evicted_first(check, shelf):
    check(shelf)


def test_what_is_worth_less_goes_first(shelf):
    shelf.run(OTHER)
    shelf.run(PROMPT, kept(10))
    for first in range(5):
        shelf.run([200 + first] * 9)
    assert shelf.run(OTHER) == 8
    assert shelf.run(PROMPT) < 8


@pytest.mark.parametrize(
    "field, retention",
    [
        ("retention", 5),
        ("retention", [(0, 4, 50)]),
        ("priority", kept(101)),
        ("token_end", [(4, 4, 50, None)]),
        ("duration_ms", kept(80, 0)),
    ],
)
def test_a_bad_range_is_refused_by_name_and_nothing_is_published(field, retention, shelf):
    table, _ = shelf.cache.match(PROMPT)
    table.append(9)
    with pytest.raises(InvalidInputError) as refused:
        shelf.cache.publish(table, PROMPT, retention=retention)
    assert refused.value.field == field
    assert shelf.pool.published_blocks().tolist() == []
    with pytest.raises(InvalidInputError, match="now_us"):
        shelf.pool.tell_time(-1)


FAULTS = {
    "last_asker_decides": check_priority,
    "hit_refreshes_nothing": check_time,
    "nothing_expires": check_time,
    "range_lifts_its_own_only": check_chain,
}


@pytest.mark.mutant
@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_noticed(fault, shelf):
    _core.set_mutant(fault)
    try:
        with pytest.raises(AssertionError):
            FAULTS[fault](shelf)
    finally:
        _core.set_mutant(None)
