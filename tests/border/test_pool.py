"""`BlockPool`, `BlockTable` and `PrefixCache` on their own: what they do; a bad call is refused by name and changes nothing.

`REFUSALS` is the table of bad calls. The tests marked `mutant` show for each kind of refusal that a core without it is noticed.
"""

import gc
import weakref
from collections.abc import Callable

import numpy as np
import pytest

from blocktable import (
    AuditError,
    BlockPool,
    BlockTable,
    BlocktableError,
    ForeignTableError,
    InvalidInputError,
    NoSuchBlockError,
    NotHeldError,
    OutOfBlocksError,
    PrefixCache,
    ReleasedError,
    _core,
)

TOKENS = list(range(100, 110))


class Scene:
    """A pool of 15 usable blocks of 4 tokens; a table of 10 tokens, two blocks of it published; two blocks held one by one."""

    def __init__(self) -> None:
        self.pool = BlockPool(16, 4)
        self.cache = PrefixCache(self.pool)
        self.table, _ = self.cache.match(TOKENS)
        self.table.append(10)
        self.cache.publish(self.table, TOKENS)
        self.single = self.pool.take(2)
        self.gone = self.pool.table()
        self.gone.append(1)
        self.gone.release()
        self.other = BlockPool(16, 4)
        self.other_cache = PrefixCache(self.other)

    def seen(self) -> dict[str, object]:
        """All that can be seen of the pool and the table."""
        pool, table = self.pool, self.table
        lists = {
            "queue": pool.free_queue(), "refs": pool.block_refs(), "published": pool.published_blocks(),
            "blocks": table.blocks, "slots": table.slots(),
        }  # fmt: skip
        return pool.stats() | {name: array.tolist() for name, array in lists.items()} | {"named": table.num_published}


@pytest.fixture
def scene() -> Scene:
    return Scene()


def test_a_table_grows_row_by_row(scene):
    table = scene.pool.table()
    slots, copies = table.append(3)
    assert (slots.dtype, slots.tolist(), copies) == (np.int64, [24, 25, 26], [])
    assert table.append(2)[0].tolist() == [27, 28]
    assert (table.num_tokens, table.num_blocks, table.blocks.tolist()) == (5, 2, [6, 7])
    assert table.slots(1, 3).tolist() == [25, 26]
    assert table.slots(4).tolist() == [28]
    assert table.append(0)[0].tolist() == []
    assert table.pool is scene.pool
    scene.pool.audit()


def test_what_is_reserved_is_used_first(scene):
    table = scene.pool.table()
    table.reserve(9)
    assert (table.num_tokens, table.num_blocks) == (0, 3)
    before = scene.pool.num_free
    assert table.append(9)[0].tolist() == table.slots().tolist()
    assert scene.pool.num_free == before
    table.reserve(1)
    assert table.num_blocks == 3
    scene.pool.audit()


def test_a_released_table_frees_its_blocks_last_block_first(scene):
    blocks = scene.table.blocks.tolist()
    queue = scene.pool.free_queue().tolist()
    scene.table.release()
    assert scene.pool.free_queue().tolist() == [blocks[2], *queue, blocks[1], blocks[0]]
    assert scene.table.is_released
    scene.pool.audit()


def test_a_table_is_released_by_the_end_of_its_with_block_and_by_the_last_reference(scene):
    before = scene.pool.num_free
    with scene.pool.table() as table:
        table.append(9)
        assert scene.pool.num_free == before - 3
    assert table.is_released
    assert scene.pool.num_free == before
    with pytest.raises(OutOfBlocksError), scene.pool.table() as table:
        table.append(1000)
    assert scene.pool.num_free == before
    with scene.pool.table() as table:
        table.append(1)
        table.release()  # then leaving the block is no second release
    table = scene.pool.table()
    table.append(9)
    reference = weakref.ref(table)
    del table
    assert reference() is None
    assert scene.pool.num_free == before
    scene.pool.audit()


def test_a_table_outlives_the_names_of_its_pool():
    table = BlockPool(8, 4).table()
    gc.collect()
    assert table.append(5)[0].tolist() == [4, 5, 6, 7, 8]
    assert table.pool.num_free == 5


def test_a_match_holds_what_it_found(scene):
    """Between finding and holding there is no gap: what comes in between takes other blocks (I5)."""
    blocks = scene.table.blocks.tolist()
    scene.table.release()
    table, cached = scene.cache.match(TOKENS)
    assert cached == 8
    flood = scene.pool.take(scene.pool.num_free)
    assert not set(flood.tolist()) & set(blocks[:2])
    assert (table.blocks.tolist(), table.num_tokens, table.num_published) == (blocks[:2], 8, 2)
    scene.pool.audit()


@pytest.mark.parametrize(("length", "cached"), [(1, 0), (4, 0), (5, 4), (8, 4), (9, 8), (10, 8)])
def test_the_last_token_is_always_computed(scene, length, cached):
    table, found = scene.cache.match(TOKENS[:length])
    assert found == table.num_tokens == cached
    scene.pool.audit()


def test_a_match_that_reserves_is_all_or_nothing(scene):
    scene.table.release()
    before, queue = scene.pool.stats(), scene.pool.free_queue().tolist()
    with pytest.raises(OutOfBlocksError) as caught:
        scene.cache.match(TOKENS, reserve=1000)
    assert (caught.value.needed, caught.value.free) == (250, 13)
    assert (scene.pool.stats(), scene.pool.free_queue().tolist()) == (before, queue)
    table, cached = scene.cache.match(TOKENS, reserve=10)
    assert (cached, table.num_blocks) == (8, 3)
    scene.pool.audit()


@pytest.fixture
def parts() -> PrefixCache:
    """Of a pool of 7 usable blocks of 4 tokens that finds parts of blocks; tokens 1 to 8 are published in blocks 1 and 2."""
    cache = PrefixCache(BlockPool(8, 4, enable_partial_hits=True))
    with cache.match(range(1, 9))[0] as table:
        table.append(8)
        cache.publish(table, range(1, 9))
    return cache


def check_parts_are_copied(parts: PrefixCache) -> None:
    table, found = parts.match([1, 2, 3, 4, 5, 6, 98, 99])
    assert (found, table.num_tokens, table.num_published, table.blocks.tolist()) == (6, 6, 1, [1, 2])
    slots, copies = table.append(2)
    assert copies == [(2, 3, 2)]
    assert (table.blocks.tolist(), slots.tolist()) == ([1, 3], [14, 15])
    assert parts.pool.stats()["prefix_hits"] == 6
    assert parts.publish(table, [1, 2, 3, 4, 5, 6, 98, 99]) == 1
    assert parts.match([1, 2, 3, 4, 5, 6, 98, 0])[1] == 7
    parts.pool.audit()


def check_parts_stay_within_a_domain(parts: PrefixCache) -> None:
    assert parts.match([1, 2, 3, 4, 5, 6, 98, 99], domain="a")[1] == 0
    assert parts.match([7, 2, 3, 4, 5, 6, 98, 99])[1] == 0, "behind another parent"
    with parts.match([1, 2, 3, 4, 5, 6, 7, 8], domain="a")[0] as table:
        table.append(8)
        parts.publish(table, [1, 2, 3, 4, 5, 6, 7, 8])
    assert parts.match([1, 2, 3, 4, 5, 6, 98, 99], domain="a")[1] == 6
    assert parts.match([1, 2, 3, 4, 5, 6, 98, 99], domain="b")[1] == 0


def check_a_reserve_counts_the_copy(parts: PrefixCache) -> None:
    others = parts.pool.take(4)
    with pytest.raises(OutOfBlocksError, match="6 .*3"):
        parts.match([1, 2, 3, 4, 5, 6, 98, 99], reserve=20)
    parts.pool.release(others)
    table, found = parts.match([1, 2, 3, 4, 5, 6, 98, 99], reserve=20)
    assert (found, parts.pool.num_free) == (6, 1)
    parts.pool.take(1)
    assert table.append(14)[1] == [(2, 3, 2)], "what was reserved is enough, though nothing is free"
    parts.pool.audit()


def check_a_fork_reserves_its_copy(parts: PrefixCache) -> None:
    parent = parts.pool.table()
    parent.append(6)
    child = parent.fork()
    child.reserve(8)
    free = parts.pool.num_free
    parts.pool.take(free)
    ((source, target, rows),) = child.append(2)[1]
    assert (source, rows) == (parent.blocks[1], 2)
    assert target == child.blocks[1]


PARTS = [
    check_parts_are_copied,
    check_parts_stay_within_a_domain,
    check_a_reserve_counts_the_copy,
    check_a_fork_reserves_its_copy,
]


@pytest.mark.parametrize("check", PARTS, ids=lambda check: check.__name__)
def test_rows_of_a_block_that_is_only_in_part_what_is_asked_for_are_found(check, parts):
    check(parts)


@pytest.mark.mutant
@pytest.mark.parametrize(
    "fault, check",
    [
        ("write_in_place", check_parts_are_copied),
        ("partial_of_anybody", check_parts_stay_within_a_domain),
        ("reserve_forgets_copy", check_a_fork_reserves_its_copy),
    ],
)
def test_a_planted_fault_of_a_part_is_noticed(fault, check, parts):
    _core.set_mutant(fault)
    try:
        with pytest.raises((AssertionError, OutOfBlocksError)):
            check(parts)
    finally:
        _core.set_mutant(None)


def test_a_pool_that_finds_no_parts_finds_full_blocks():
    cache = PrefixCache(BlockPool(8, 4))
    with cache.match(range(1, 9))[0] as table:
        table.append(8)
        cache.publish(table, range(1, 9))
    assert cache.match([1, 2, 3, 4, 5, 6, 98, 99])[1] == 4


def test_a_pool_that_is_reset_still_finds_parts(parts):
    parts.pool.reset()
    with parts.match(range(1, 9))[0] as table:
        table.append(8)
        parts.publish(table, range(1, 9))
    assert parts.match([1, 2, 3, 4, 5, 6, 98, 99])[1] == 6


def test_hits_are_counted_when_they_are_used_and_once(scene):
    before = scene.pool.stats()
    tables = [scene.cache.match(TOKENS)[0] for _ in range(3)]
    assert scene.pool.stats()["prefix_hits"] == before["prefix_hits"]
    for _ in range(2):
        tables[0].append(1)
    after = scene.pool.stats()
    assert after["prefix_hits"] - before["prefix_hits"] == 8
    assert after["prefix_queries"] - before["prefix_queries"] == 10
    assert after["prefix_prompts"] - before["prefix_prompts"] == 1


def test_a_chain_is_published_in_pieces_as_in_one(scene):
    pool, more = scene.pool, [1, 2, 3, 4, 5, 6]
    scene.table.append(6)
    assert scene.cache.publish(scene.table, TOKENS[8:] + more, start=8) == 2
    whole, _ = scene.cache.match([*TOKENS, *more, 0])
    assert whole.num_tokens == 16
    other = BlockPool(16, 4)
    other_cache = PrefixCache(other)
    table = other.table()
    table.append(16)
    assert other_cache.publish(table, TOKENS + more) == 4
    assert other_cache.publish(table, TOKENS + more) == 0
    assert other_cache.match([*TOKENS, *more, 0])[1] == 16
    pool.audit()


def test_only_what_is_written_is_published(scene):
    scene.table.append(6)
    assert scene.cache.publish(scene.table, [*TOKENS, 1]) == 0, "11 tokens are written: two full blocks, both published"
    assert scene.cache.publish(scene.table, [*TOKENS, 1, 2]) == 1
    assert scene.table.num_published == 3


def test_seed_and_algorithm_separate_caches(scene):
    for options in ({"seed": b"x"}, {"algorithm": "blake3"}):
        assert PrefixCache(scene.pool, **options).match(TOKENS)[1] == 0
    assert PrefixCache(scene.pool).match(TOKENS)[1] == 8


WHO = (
    {}, {"domain": "a"}, {"domain": "b"}, {"cache_salt": "x"}, {"cache_salt": [(0, 4, "y")]}, {"adapter": ("one", 1)},
    {"adapter": ("one", 2)}, {"media": [(1, 3, "cat")]}, {"media": [(1, 3, "dog")]},
)  # fmt: skip
"""Who may share a prefix: no two of these."""


def check_who(scene: Scene, who: dict[str, object]) -> None:
    """What is published for one of them, by a table or by its fork, is found by that one only."""
    tokens = list(range(50, 66))
    with scene.cache.match(tokens, **who)[0] as table:
        table.append(8)
        scene.cache.publish(table, tokens[:8])
        with table.fork() as child:
            child.append(8)
            scene.cache.publish(child, tokens[8:], start=8)
    for other in WHO:
        found, cached = scene.cache.match(tokens, **other)
        assert cached == (12 if other == who else 0), other
        found.release()
    scene.pool.audit()


@pytest.mark.parametrize("who", WHO, ids=str)
def test_nobody_else_finds_what_is_published_for_one(scene, who):
    check_who(scene, who)


@pytest.mark.parametrize(("one", "other"), [("a", "b"), ("b", "a")])
def test_tenants_share_the_public_range_and_nothing_after_it(scene, one, other):
    tokens = list(range(50, 66))
    with scene.cache.match(tokens, domain=one, public_tokens=8)[0] as table:
        table.append(16)
        scene.cache.publish(table, tokens)
    cached = {
        (who, public): scene.cache.match(tokens, domain=who, public_tokens=public)[1]
        for who in (one, other)
        for public in (0, 8)
    }
    assert cached == {(one, 8): 12, (other, 8): 8, (one, 0): 0, (other, 0): 0}


def test_a_reset_of_the_cache_forgets_what_nobody_holds(scene):
    assert scene.cache.reset() == 0
    assert scene.cache.match(TOKENS)[1] == 8
    scene.table.release()
    gc.collect()
    assert scene.cache.reset() == 2
    assert scene.cache.match(TOKENS)[1] == 0
    assert scene.pool.published_blocks().tolist() == []
    scene.pool.audit()


def test_a_cut_inside_published_content_copies_before_the_next_write(scene):
    blocks = scene.table.blocks.tolist()
    scene.table.truncate(6)
    assert scene.table.blocks.tolist() == blocks[:2]
    slots, copies = scene.table.append(1)
    assert len(copies) == 1
    source, target, rows = copies[0]
    assert (source, rows) == (blocks[1], 2)
    assert scene.table.blocks.tolist() == [blocks[0], target]
    assert slots.tolist() == [4 * target + 2]
    assert scene.cache.match(TOKENS)[1] == 8, "what was published is still there"
    scene.pool.audit()


def test_a_cut_at_the_edge_of_a_block_copies_nothing(scene):
    scene.table.truncate(8)
    assert scene.table.append(1)[1] == []
    scene.table.truncate(0)
    assert (scene.table.num_blocks, scene.table.num_tokens, scene.table.num_published) == (0, 0, 0)
    scene.pool.audit()


def test_a_fork_shares_all_and_copies_its_tail_on_the_first_write(scene):
    blocks, free = scene.table.blocks.tolist(), scene.pool.num_free
    child = scene.table.fork()
    assert (child.blocks.tolist(), child.num_tokens, child.num_published) == (blocks, 10, 2)
    assert scene.pool.num_free == free
    assert scene.pool.block_refs()[blocks].tolist() == [2, 2, 2]
    slots, copies = child.append(3)
    own = child.blocks.tolist()[2:]
    assert copies == [(blocks[2], own[0], 2)]
    assert slots.tolist() == [4 * own[0] + 2, 4 * own[0] + 3, 4 * own[1]]
    assert child.blocks.tolist()[:2] == blocks[:2]
    slots, copies = scene.table.append(1)
    assert (slots.tolist(), copies) == ([4 * blocks[2] + 2], []), "the last owner writes in place"
    assert scene.pool.block_refs()[blocks].tolist() == [2, 2, 1]
    scene.pool.audit()
    child.release()
    scene.pool.audit()


def test_reserved_blocks_stay_with_the_parent(scene):
    scene.table.reserve(30)
    child = scene.table.fork()
    assert (scene.table.num_blocks, child.num_blocks) == (8, 3)
    assert scene.table.append(20)[1] == [(3, scene.table.blocks.tolist()[2], 2)]
    scene.pool.audit()


@pytest.mark.parametrize("prompt", [1, 15, 16, 17, 1000])
def test_children_hold_the_shared_blocks_and_their_own(prompt):
    """After w rows each of n children has ceil((prompt mod B + w) / B) blocks of its own, beside the shared ones."""
    size, n = 16, 16
    pool = BlockPool(1 + prompt // size + n * 5, size)
    parent = pool.table()
    parent.append(prompt)
    children = [parent.fork() for _ in range(n)]
    parent.release()
    for written in range(1, 40):
        for child in children:
            child.append(1)
        own = -(-(prompt % size + written) // size)
        used = pool.stats()["used_blocks"]
        assert used == prompt // size + n * own, written
        pool.audit()


def test_forks_of_forks_outlive_their_parents(scene):
    tables = [scene.table]
    for _ in range(5):
        tables.append(tables[-1].fork())
        tables[-1].append(3)
    for table in tables[::2]:
        table.release()
        scene.pool.audit()
    assert [table.num_tokens for table in tables[1::2]] == [13, 19, 25]


def test_single_blocks_are_shared_and_released_as_often(scene):
    scene.pool.share(scene.single)
    scene.pool.release(scene.single)
    free = scene.pool.num_free
    scene.pool.release(scene.single)
    assert scene.pool.num_free == free + 2
    scene.pool.audit()


def test_single_blocks_come_and_go(scene):
    assert scene.single.tolist() == [4, 5]
    assert scene.single.dtype == np.int32
    queue = scene.pool.free_queue().tolist()
    scene.pool.release(scene.single)
    assert scene.pool.free_queue().tolist() == [5, 4, *queue]
    scene.pool.release(np.array([0, 0]))
    scene.pool.audit()


def test_a_reset_pool_is_as_new(scene):
    scene.pool.reset()
    assert scene.pool.free_queue().tolist() == list(range(1, 16))
    assert scene.pool.stats() == BlockPool(16, 4).stats()
    assert scene.table.is_released
    assert scene.cache.match(TOKENS)[1] == 0
    scene.pool.audit()


REFUSALS: dict[str, tuple[type[BlocktableError], Callable[[Scene], object]]] = {
    "release twice": (ReleasedError, lambda s: s.gone.release()),
    "append after release": (ReleasedError, lambda s: s.gone.append(1)),
    "reserve after release": (ReleasedError, lambda s: s.gone.reserve(1)),
    "truncate after release": (ReleasedError, lambda s: s.gone.truncate(0)),
    "slots after release": (ReleasedError, lambda s: s.gone.slots()),
    "blocks after release": (ReleasedError, lambda s: s.gone.blocks),
    "tokens after release": (ReleasedError, lambda s: s.gone.num_tokens),
    "number of blocks after release": (ReleasedError, lambda s: s.gone.num_blocks),
    "number of published after release": (ReleasedError, lambda s: s.gone.num_published),
    "fork after release": (ReleasedError, lambda s: s.gone.fork()),
    "publish after release": (ReleasedError, lambda s: s.cache.publish(s.gone, TOKENS)),
    "publish the table of another pool": (ForeignTableError, lambda s: s.cache.publish(s.other.table(), [])),
    "publish in the cache of another pool": (ForeignTableError, lambda s: s.other_cache.publish(s.table, TOKENS)),
    "append too much": (OutOfBlocksError, lambda s: s.table.append(1000)),
    "append far too much": (InvalidInputError, lambda s: s.table.append(2**32 - 1)),
    "reserve too much": (OutOfBlocksError, lambda s: s.table.reserve(1000)),
    "match and reserve too much": (OutOfBlocksError, lambda s: s.cache.match(TOKENS, reserve=1000)),
    "take too many": (OutOfBlocksError, lambda s: s.pool.take(100)),
    "truncate to more": (InvalidInputError, lambda s: s.table.truncate(11)),
    "slots past the end": (InvalidInputError, lambda s: s.table.slots(0, 11)),
    "slots backwards": (InvalidInputError, lambda s: s.table.slots(3, 2)),
    "publish rows that are not there": (InvalidInputError, lambda s: s.cache.publish(s.table, TOKENS + TOKENS)),
    "publish other tokens": (InvalidInputError, lambda s: s.cache.publish(s.table, [1, 2, 3, 4])),
    "publish from inside a block": (InvalidInputError, lambda s: s.cache.publish(s.table, TOKENS[2:], start=2)),
    "publish with a gap": (InvalidInputError, lambda s: s.cache.publish(s.table, [], start=12)),
    "match nothing": (InvalidInputError, lambda s: s.cache.match([])),
    "match for a tenant without a name": (InvalidInputError, lambda s: s.cache.match(TOKENS, domain="")),
    "match with more public than there is": (InvalidInputError, lambda s: s.cache.match(TOKENS, public_tokens=11)),
    "match what is no token": (InvalidInputError, lambda s: s.cache.match([-1, 2])),
    "release what a table holds": (NotHeldError, lambda s: s.pool.release(s.table.blocks)),
    "release what is free": (NotHeldError, lambda s: s.pool.release([4, 9])),
    "release one block twice in a list": (NotHeldError, lambda s: s.pool.release([4, 5, 4])),
    "release the block of another pool": (NoSuchBlockError, lambda s: s.pool.release([4, 16])),
    "release a negative block": (InvalidInputError, lambda s: s.pool.release([4, -1])),
    "share what a table holds": (NotHeldError, lambda s: s.pool.share(s.table.blocks)),
    "share what is free": (NotHeldError, lambda s: s.pool.share([4, 9])),
    "share the block of another pool": (NoSuchBlockError, lambda s: s.pool.share([4, 16])),
    "release text": (InvalidInputError, lambda s: s.pool.release("45")),
    "unknown algorithm": (InvalidInputError, lambda s: PrefixCache(s.pool, algorithm="md5")),
    "a pool of one": (InvalidInputError, lambda s: BlockPool(1, 4)),
    "a pool of none": (InvalidInputError, lambda s: BlockPool(0, 4)),
    "blocks of no token": (InvalidInputError, lambda s: BlockPool(8, 0)),
    "blocks of too many tokens": (InvalidInputError, lambda s: BlockPool(8, 4097)),
    **{
        f"{name} {value!r}": (InvalidInputError, lambda s, call=call, value=value: call(s, value))
        for value in (-1, True, 1.0, "1", None, 2**32, -(2**70))
        for name, call in {
            "append": lambda s, value: s.table.append(value),
            "reserve": lambda s, value: s.table.reserve(value),
            "truncate to": lambda s, value: s.table.truncate(value),
            "take": lambda s, value: s.pool.take(value),
            "match with reserve": lambda s, value: s.cache.match(TOKENS, reserve=value if value is not None else "none"),
            "pool of": lambda s, value: BlockPool(value, 4),
            "blocks of": lambda s, value: BlockPool(8, value),
        }.items()
    },
}


@pytest.mark.parametrize("bad", REFUSALS)
def test_a_bad_call_is_refused_by_its_type_and_changes_nothing(scene, bad):
    check_refusal(scene, bad)


def check_refusal(scene: Scene, bad: str) -> None:
    kind, call = REFUSALS[bad]
    before = scene.seen()
    with pytest.raises(BlocktableError) as caught:
        call(scene)
    assert type(caught.value) is kind, caught.value
    if isinstance(caught.value, InvalidInputError):
        assert caught.value.field
        assert caught.value.bound
    assert scene.seen() == before
    scene.pool.audit()


@pytest.mark.parametrize("bad", ["append", "release", "publish"])
def test_a_table_of_a_pool_that_was_reset_is_refused(scene, bad):
    check_reset(scene, bad)


def check_reset(scene: Scene, bad: str) -> None:
    scene.pool.reset()
    queue = scene.pool.free_queue().tolist()
    calls = {
        "append": lambda: scene.table.append(1),
        "release": lambda: scene.table.release(),
        "publish": lambda: scene.cache.publish(scene.table, []),
    }
    with pytest.raises(ReleasedError):
        calls[bad]()
    with pytest.raises(NotHeldError):
        scene.pool.release(scene.single)
    assert scene.pool.free_queue().tolist() == queue
    scene.pool.audit()


def test_a_table_and_a_pool_of_nothing_else_is_made_by_hand():
    with pytest.raises(TypeError):
        BlockTable()
    with pytest.raises(TypeError):
        PrefixCache(object())


MUTANTS = {
    "release_keeps_seat": ("release twice", "append after release", "publish after release"),
    "foreign_table_taken": ("publish the table of another pool", "publish in the cache of another pool"),
    "loose_drops_others": ("release what a table holds",),
    "publish_unwritten": ("publish rows that are not there",),
    "publish_other_tokens": ("publish other tokens",),
    "blocked_keeps_hits": ("match and reserve too much",),
    "clamp_negative": ("append -1", "reserve -1", "truncate to -1", "take -1", "match with reserve -1"),
    "partial_take": ("take too many",),
}


BROKEN = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
"""A pool that a planted fault has broken may break down once more when Python forgets the tables."""


@BROKEN
@pytest.mark.mutant
@pytest.mark.parametrize(("mutant", "bad"), [(mutant, bad) for mutant, calls in MUTANTS.items() for bad in calls])
def test_a_core_that_takes_a_bad_call_is_noticed(mutant, bad):
    _core.set_mutant(mutant)
    try:
        with pytest.raises((AssertionError, AuditError, pytest.fail.Exception)):
            check_refusal(Scene(), bad)
    finally:
        _core.set_mutant(None)


@pytest.mark.mutant
@pytest.mark.parametrize("bad", ["append", "release", "publish"])
def test_a_reset_that_keeps_tables_alive_is_noticed(bad):
    scene = Scene()
    _core.set_mutant("reset_keeps_tables")
    try:
        with pytest.raises((AssertionError, pytest.fail.Exception)):
            check_reset(scene, bad)
    finally:
        _core.set_mutant(None)


BEHAVIOUR = {
    "chain_forgotten": lambda scene: check_who(scene, {"domain": "a"}),
    "hit_whole_prompt": lambda scene: test_the_last_token_is_always_computed(scene, 8, 4),
    "skip_ref_on_hit": test_a_match_holds_what_it_found,
    "hit_keeps_in_queue": test_a_match_holds_what_it_found,
    "recount_queries_on_retry": test_hits_are_counted_when_they_are_used_and_once,
    "write_in_place": test_a_cut_inside_published_content_copies_before_the_next_write,
    "truncate_keeps_block": test_a_cut_at_the_edge_of_a_block_copies_nothing,
    "fork_misses_last": test_a_fork_shares_all_and_copies_its_tail_on_the_first_write,
    "copy_keeps_holder": test_a_fork_shares_all_and_copies_its_tail_on_the_first_write,
    "forward_order": test_a_released_table_frees_its_blocks_last_block_first,
    "head_order": test_a_released_table_frees_its_blocks_last_block_first,
    "leak_block_on_finish": test_a_table_is_released_by_the_end_of_its_with_block_and_by_the_last_reference,
    "keep_key_on_reuse": lambda scene: check_reuse(scene),
}


def check_reuse(scene: Scene) -> None:
    """What is handed out again is not found any more (I8)."""
    scene.table.release()
    flood = scene.pool.take(scene.pool.num_free)
    assert scene.cache.match(TOKENS)[1] == 0
    scene.pool.release(flood)
    scene.pool.audit()


def test_a_block_that_is_handed_out_again_is_not_found_any_more(scene):
    check_reuse(scene)


@BROKEN
@pytest.mark.mutant
@pytest.mark.parametrize("mutant", BEHAVIOUR)
def test_a_core_that_behaves_otherwise_is_noticed(mutant):
    scene = Scene()
    _core.set_mutant(mutant)
    try:
        with pytest.raises((AssertionError, BlocktableError)):
            BEHAVIOUR[mutant](scene)
    finally:
        _core.set_mutant(None)


def test_taking_and_releasing_makes_no_object_for_a_block():
    """As many collected objects for a thousand blocks as for one, and none of them stays."""
    pool = BlockPool(5000, 16)
    pool.release(pool.take(1))

    def made(num_blocks: int) -> int:
        gc.collect()
        gc.disable()
        try:
            before = gc.get_count()[0]
            held = pool.take(num_blocks)
            table = pool.table()
            slots, copies = table.append(num_blocks * 16)
            after = gc.get_count()[0]
        finally:
            gc.enable()
        assert len(held) == num_blocks
        assert len(slots) == 16 * num_blocks
        assert copies == []
        pool.release(held)
        return after - before

    assert made(2000) == made(1) < 10


@pytest.mark.mutant  # only that build counts
def test_a_decoding_table_allocates_only_when_a_block_is_taken():
    pool = BlockPool(5000, 16)
    table = pool.table()
    table.append(16)
    pool.release(pool.take(1))

    def allocations(call: Callable[[], object]) -> int:
        before = _core.allocations()
        call()
        return _core.allocations() - before

    assert allocations(lambda: table.append(1)) <= 4, "the list of slots, on its way out"
    pool.release(pool.take(4000))
    assert allocations(lambda: pool.release(pool.take(4000))) <= 20, "lists that double, nothing for each block"
