"""Who may share a prefix, said in Python: every sensible form means what it says, and every other is refused by its field."""

import pytest

from blocktable import BlockHasher, BlockPool, InvalidInputError, PrefixCache, Scheduler

TOKENS = list(range(10))

SAID = [
    {},
    {"domain": "a"},
    {"domain": "b"},
    {"domain": "a", "public_tokens": 3},
    {"public_tokens": 3},
    {"adapter": ("a", 1)},
    {"adapter": ("a", 2)},
    {"cache_salt": "a"},
    {"cache_salt": "é"},
    {"cache_salt": [(4, 6, "a")]},
    {"media": [(4, 6, "a")]},
    {"media": [(5, 7, "a")]},
    {"domain": "a", "adapter": ("a", 1), "cache_salt": "a", "media": ((4, 6, "a"),)},
]

BAD = {
    "domain": ["", 5, b"a", "x" * 1025, "\ud800"],
    "public_tokens": [-1, 11, 1.0, True, "3"],
    "adapter": ["a", ("a",), ("a", -1), (1, 1), ("", 1), ("a", 1, 2), ("a", 1, "p", 4), ["a", 1]],
    "cache_salt": ["", b"a", 5, [("a", 1, 2)], [(0, 11, "a")], [(3, 3, "a")], [(-1, 2, "a")], [(0, 2, "")], [(0, 2)], {}],
    "media": ["", [(0, 2, "")], [(0, 11, "a")], [(0, 5, "a"), (4, 6, "b")], 5, [5], [[0, 2, "a"]]],
}


def test_whatever_is_said_makes_other_keys():
    hasher = BlockHasher(block_size=2)
    every = [hasher.keys(TOKENS, **said)[-1] for said in SAID]
    assert len(set(every)) == len(SAID)


def test_what_says_nothing_makes_the_keys_of_before():
    hasher = BlockHasher(block_size=2)
    nothing = {"domain": None, "public_tokens": 0, "adapter": None, "cache_salt": None, "media": []}
    assert hasher.keys(TOKENS, **nothing) == hasher.keys(TOKENS)
    assert hasher.keys(TOKENS, cache_salt=[]) == hasher.keys(TOKENS)


@pytest.mark.parametrize("said", SAID, ids=str)
def test_submit_takes_all_that_a_hasher_takes(make_scheduler, said):
    for caching in (True, False):
        scheduler = make_scheduler(enable_prefix_caching=caching)
        scheduler.submit(TOKENS, max_tokens=1, **said)
        assert scheduler.plan(0).token_ids.tolist() == TOKENS


@pytest.mark.parametrize(("field", "value"), [(field, value) for field, values in BAD.items() for value in values], ids=ascii)
def test_what_makes_no_sense_is_refused_by_its_field_and_nothing_is_queued(make_scheduler, field, value):
    for caching in (True, False):
        scheduler: Scheduler = make_scheduler(enable_prefix_caching=caching)
        with pytest.raises(InvalidInputError) as caught:
            scheduler.submit(TOKENS, max_tokens=1, **{field: value})
        assert caught.value.field == field
        assert caught.value.bound
        assert scheduler.num_waiting == 0
        scheduler.audit()


@pytest.mark.parametrize("algorithm", ["sha256_cbor", "vllm_sha256"])
@pytest.mark.parametrize(
    ("field", "value"),
    [("domain", "a"), ("public_tokens", 2), ("adapter", ("a", 1)), ("cache_salt", [(0, 2, "a")])],
    ids=["domain", "public_tokens", "adapter", "cache_salt"],
)
def test_what_vllms_keys_have_no_place_for_is_refused(make_scheduler, algorithm, field, value):
    scheduler = make_scheduler(hash_algorithm=algorithm)
    with pytest.raises(InvalidInputError, match=algorithm) as caught:
        scheduler.submit(TOKENS, max_tokens=1, **{field: value})
    assert caught.value.field == field
    with pytest.raises(InvalidInputError, match=algorithm):
        scheduler.set_weights_version("2")
    for option in ({"hash_seed": b"\xff"}, {"kv_layout": b"x"}, {"weights_version": "x"}):
        with pytest.raises(InvalidInputError, match=algorithm):
            make_scheduler(hash_algorithm=algorithm, **option)


def test_the_configuration_says_what_the_keys_depend_on(make_scheduler):
    scheduler = make_scheduler(hash_algorithm="blake3", kv_layout=b"float32", weights_version="1")
    assert (scheduler.config["hash_algorithm"], scheduler.config["kv_layout"]) == ("blake3", b"float32")
    assert scheduler.config["weights_version"] == "1"
    assert scheduler.set_weights_version("2") == 0
    assert scheduler.config["weights_version"] == "2"


@pytest.mark.parametrize("enable_prefix_caching", [True, False])
def test_rows_of_two_versions_are_told_with_and_without_a_prefix_cache(make_scheduler, answer, enable_prefix_caching):
    scheduler = make_scheduler(enable_prefix_caching=enable_prefix_caching, max_num_seqs=1)
    runs, waits = (scheduler.submit(TOKENS, max_tokens=4) for _ in range(2))
    answer(scheduler, scheduler.plan(0))
    assert scheduler.set_weights_version("2") == 1
    assert (scheduler.is_mixed(runs), scheduler.is_mixed(waits)) == (True, False)
    assert scheduler.set_weights_version("2") == 0
    while (plan := scheduler.plan(0)).num_seqs:
        answer(scheduler, plan)
    scheduler.audit()


def test_a_miss_says_why_and_is_counted(make_scheduler, answer):
    scheduler = make_scheduler(explain_misses=True)

    def ask(tokens: list[int], **said: object) -> str | None:
        request = scheduler.submit(tokens, max_tokens=1, **said)
        assert scheduler.miss_reason(request) is None, "not before it was admitted"
        while (plan := scheduler.plan(0)).num_seqs:
            answer(scheduler, plan)
        return scheduler.miss_reason(request)

    turns = [
        ({}, "never_seen"),
        ({}, "nothing"),
        ({"cache_salt": "a"}, "other_salt"),
        ({"adapter": ("a", 1)}, "other_adapter"),
        ({"domain": "a"}, "never_seen"),
    ]
    assert [ask(TOKENS, **said) for said, _ in turns] == [why for _, why in turns]
    assert ask([1]) == "shorter_than_block"
    assert scheduler.reset_prefix_cache() > 0
    assert ask(TOKENS) == "evicted"
    stats = scheduler.stats()
    counted = {name.removeprefix("miss_"): count for name, count in stats.items() if name.startswith("miss_") and count}
    wanted = {"never_seen": 1, "nothing": 1, "other_salt": 1, "other_adapter": 1, "other_domain": 1}
    assert counted == wanted | {"shorter_than_block": 1, "evicted": 1}


def test_nothing_is_explained_unless_it_was_asked_for(make_scheduler):
    scheduler = make_scheduler()
    request = scheduler.submit(TOKENS, max_tokens=1)
    scheduler.plan(0)
    assert scheduler.miss_reason(request) is None
    assert not any(count for name, count in scheduler.stats().items() if name.startswith("miss_"))


def test_caches_of_one_pool_share_blocks_only_if_all_is_equal():
    pool = BlockPool(num_blocks=64, block_size=2)
    every = [
        {},
        {"domain": "a"},
        {"domain": "b"},
        {"cache_salt": "a"},
        {"adapter": ("a", 1)},
        {"domain": "a", "cache_salt": "a"},
        {"algorithm": "sha256_cbor", "cache_salt": "a"},
        {"algorithm": "sha256_cbor"},
    ]
    caches = {name: PrefixCache(pool, algorithm=name) for name in ("sha256", "sha256_cbor")}

    def match(said):
        who = {name: value for name, value in said.items() if name != "algorithm"}
        cache = caches[said.get("algorithm", "sha256")]
        return cache, *cache.match(TOKENS, **who)

    for said in every:
        cache, table, found = match(said)
        assert found == 0, said
        table.append(len(TOKENS))
        assert cache.publish(table, TOKENS) == 5
        table.release()
    for said in every:
        _, table, found = match(said)
        assert found == 8, said
        table.release()
    pool.audit()


@pytest.mark.parametrize(
    ("field", "value"),
    [("domain", ""), ("domain", 5), ("adapter", "a"), ("cache_salt", ""), ("cache_salt", [(0, 99, "a")])],
    ids=str,
)
def test_a_match_for_nobody_is_refused(field, value):
    pool = BlockPool(num_blocks=4, block_size=2)
    with pytest.raises(InvalidInputError) as caught:
        PrefixCache(pool).match(TOKENS, **{field: value})
    assert caught.value.field == field
