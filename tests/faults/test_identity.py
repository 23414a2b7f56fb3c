"""Identity of content (catalogue 37, 40 to 46): a key names all tokens before it, who may share them and what computed
them, and is the same in every process."""

import hashlib
import io
import itertools
import pickle
import subprocess
import sys
from collections.abc import Callable
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import blocktable
from blocktable._core import BlockHasher, Scheduler
from tests.faults.promises import Promises
from tests.faults.scene import VOCAB_SIZE, prompt, scene

PROMISES = Promises()


@PROMISES.row(40, mutants=("key_without_parent",))
def test_equal_blocks_behind_different_parents_are_different() -> None:
    """Fault 40: the chain enters the key, and the scheduler finds by it."""
    hasher = BlockHasher(block_size=2)
    assert hasher.keys([1, 2, 9, 9])[1] != hasher.keys([1, 3, 9, 9])[1]
    driver = scene(block_size=2)
    tail = prompt(9, 4)
    driver.generate(prompt(1, 2) + tail + [5], max_tokens=1)
    assert driver.generate(prompt(2, 2) + tail + [5], max_tokens=1).cached == 0
    driver.drain()


@PROMISES.row(43, mutants=("key_without_parent",))
def test_no_two_chains_of_a_large_set_share_a_key() -> None:
    """Fault 43: 70,000 blocks whose tokens differ in one place, in one of three lengths of chain."""
    hasher = BlockHasher(block_size=2)
    keys: set[bytes] = set()
    count = 0
    for number in range(23_400):
        for chain in ([number, 7], [7, 7, number, 7], [number, 8, 7, 7]):
            keys.add(hasher.keys(chain)[-1])
            count += 1
    assert count >= 70_000
    assert len(keys) == count


def _domains_are_apart(make: Callable[..., BlockHasher]) -> None:
    tokens = list(range(32))
    keys = [
        make(block_size=size, algorithm=algorithm, seed=seed).keys(tokens)[0]
        for size in (8, 16)
        for algorithm in ("blake3", "sha256")
        for seed in (b"", b"a", b"b", b"a\0")
    ]
    assert len(set(keys)) == len(keys)
    assert all(len(key) == 32 for key in keys)


def test_algorithm_seed_and_block_size_separate_domains() -> None:
    """Fault 43: what does not stand in the tokens stands in the key."""
    _domains_are_apart(BlockHasher)


@pytest.mark.parametrize(
    "forgotten", [{"seed": b""}, {"algorithm": "sha256"}, {"block_size": 8}], ids=lambda kept: next(iter(kept))
)
def test_a_domain_that_is_left_out_is_caught(forgotten: dict[str, Any]) -> None:
    """The control: a hasher that ignores one of the three."""
    with pytest.raises(AssertionError):
        _domains_are_apart(lambda **options: BlockHasher(**(options | forgotten)))


def _nobody_shares(prompt: list[int], every: list[dict[str, Any]]) -> None:
    """Each asks twice: it finds nothing of the others, and then its own, so that caching was on."""
    driver = scene(block_size=4, usable=200)
    full = (len(prompt) - 1) // 4 * 4
    for wanted in (0, full):
        for said in every:
            found = driver.generate(prompt, **said).cached
            assert found == wanted, f"{said} found {found} tokens, not {wanted}"
    driver.drain()


@PROMISES.row(41, mutants=("adapter_forgotten", "adapter_load_forgotten", "salt_forgotten", "media_forgotten"))
def test_an_adapter_a_salt_and_a_picture_of_one_name_are_three_things() -> None:
    """Fault 41: adapter X, salt X, media X and none, with equal tokens; and an adapter that is loaded anew."""
    every: list[dict[str, Any]] = [
        {},
        {"adapter": ("X", 1)},
        {"adapter": ("X", 2)},
        {"cache_salt": "X"},
        {"media": [(0, 4, "X")]},
        {"domain": "X"},
    ]
    keys = [key for said in every for key in BlockHasher(block_size=4).keys(prompt(1, 13), **said)]
    assert len(set(keys)) == len(keys)
    _nobody_shares(prompt(1, 13), every)


@PROMISES.row(43, mutants=("field_without_tag", "field_without_length", "media_without_offset", "salt_in_first_block_only"))
def test_fields_do_not_run_into_each_other() -> None:
    """Fault 43: lists that hold the same bytes in other pieces, at other places, or as another kind."""
    tokens = list(range(12))
    every: list[dict[str, Any]] = [
        {"cache_salt": [(8, 12, "ab"), (8, 12, "c")]},
        {"cache_salt": [(8, 12, "a"), (8, 12, "bc")]},
        {"cache_salt": [(8, 12, "abc")]},
        {"cache_salt": [(8, 12, "a\3b")]},
        {"cache_salt": [(8, 12, "a"), (8, 12, "b")]},
        {"cache_salt": [(8, 12, "\0" * 8 + "\2" + "\0" * 7 + "abc")]},
        {"public_tokens": 4, "domain": "abc"},
        {"public_tokens": 4, "domain": "ab", "cache_salt": [(8, 12, "c")]},
        {"media": [(8, 10, "abc")]},
        {"media": [(9, 11, "abc")]},
        {"media": [(7, 9, "abc")]},
        {"media": [(8, 9, "ab"), (9, 10, "c")]},
        {"media": [(8, 9, "a"), (9, 10, "bc")]},
        {"media": [(8, 9, "abc"), (9, 10, "abc")]},
    ]
    for algorithm in ("sha256", "blake3"):
        last = [BlockHasher(block_size=4, algorithm=algorithm).keys(tokens, **said)[-1] for said in every]
        same = [(every[i], every[j]) for i, j in itertools.combinations(range(len(every)), 2) if last[i] == last[j]]
        assert not same


@PROMISES.row(43, mutants=("media_forgotten",))
def test_no_two_of_many_pictures_share_a_key() -> None:
    """Fault 43: 70,000 ids, longer than a key, that differ at their ends."""
    hasher = BlockHasher(block_size=2)
    ids = (f"{number:064}" for number in range(70_000))
    assert len({hasher.keys([1, 2], media=[(0, 2, name)])[0] for name in ids}) == 70_000


@PROMISES.row(46, mutants=("domain_forgotten", "tenant_after_public_forgotten", "salt_forgotten", "outputs_without_chain"))
def test_two_tenants_share_what_is_public_and_nothing_else() -> None:
    """Fault 46: equal prompts of two tenants, one of whom knows the salt of the other, in both directions."""
    for one, other in (("a", "b"), ("b", "a")):
        every: list[dict[str, Any]] = [
            {"domain": one, "cache_salt": "of one"},
            {"domain": other},
            {"domain": other, "cache_salt": "of one"},
            {"domain": one},
            {"domain": one, "cache_salt": "of another"},
        ]
        _nobody_shares(prompt(1, 13), every)
        driver = scene(block_size=4)
        public = {"public_tokens": 7}
        found = [driver.generate(prompt(1, 13), domain=name, **public).cached for name in (one, other, one, other)]
        assert found == [0, 4, 12, 12]
        assert driver.generate(prompt(1, 13), domain=other).cached == 0
        answered = driver.generate(prompt(2, 8), domain=one, public_tokens=8, max_tokens=6)
        next_turn = prompt(2, 8) + answered.outputs[:5]
        found = [driver.generate(next_turn, domain=name, public_tokens=8).cached for name in (other, one)]
        assert found == [8, 12], "what a tenant was answered behind a public prompt is its own"
        driver.drain()


@PROMISES.row(37, mutants=("weights_forgotten", "waiting_keeps_old_keys", "mixed_rows_published"))
def test_other_weights_find_nothing_of_the_old_ones() -> None:
    """Fault 37: new weights under a request that runs and one that waits."""
    scheduler = Scheduler(num_blocks=33, block_size=4, vocab_size=VOCAB_SIZE, max_model_len=64, max_num_seqs=1)

    def step() -> None:
        plan = scheduler.plan(0)
        ids = np.full(len(plan.sample_rows), 7, np.int64)
        scheduler.commit(plan.step, ids, np.arange(len(ids) + 1), 0)

    def cached(tokens: list[int]) -> int:
        request = scheduler.submit(tokens, max_tokens=1)
        while scheduler.num_running or scheduler.num_waiting:
            step()
        return scheduler.num_cached_tokens(request)

    assert [cached(prompt(1, 13)) for _ in range(2)] == [0, 12]
    runs = scheduler.submit(prompt(2, 13), max_tokens=8)
    step()
    waits = scheduler.submit(prompt(1, 13), max_tokens=1)
    assert scheduler.set_weights_version("2") == 1
    assert scheduler.is_mixed(runs) != scheduler.is_mixed(waits)
    assert cached(prompt(2, 13) + [7] * 8) == 0, "rows of two versions are nobody's"
    assert scheduler.num_cached_tokens(waits) == 0
    assert cached(prompt(1, 13)) == 12
    scheduler.audit()


def _vllm_keys(tokens: list[int], size: int, extras: Callable[[int], Any]) -> list[bytes]:
    """vLLM's `sha256`, written down from its description with Python's own pickle."""

    def digest(value: object) -> bytes:
        return hashlib.sha256(pickle.dumps(value, protocol=5)).digest()

    parent, keys = digest("vllm-none-hash"), []
    for start in range(0, len(tokens) - size + 1, size):
        parent = digest((parent, tuple(tokens[start : start + size]), extras(start)))
        keys.append(parent)
    return keys


@PROMISES.row(44, mutants=("vllm_salt_in_every_block",))
def test_keys_of_vllm_are_those_that_pickle_gives() -> None:
    """Fault 44: ids of all sizes, adapter, salt and two pictures, through the pickle of this very Python."""
    hasher = BlockHasher(block_size=3, algorithm="vllm_sha256")
    tokens = [0, 255, 256, 65535, 65536, 2**31 - 1, 2**31, 2**32 - 1, 7, 8, 9, 10]
    assert hasher.keys(tokens) == _vllm_keys(tokens, 3, lambda _: None)

    def extras(start: int) -> Any:
        items = [("lora", "name", "path" * 99)]
        items += [("mm", name, at - start) for at, end, name in pictures if at < start + 3 and end > start]
        return tuple(items + [("cache_salt", "é")] * (start == 0))

    pictures = [(1, 4, "first"), (4, 5, "second"), (5, 11, "third" * 80)]
    found = hasher.keys(tokens, adapter=("name", 0, "path" * 99), cache_salt="é", media=pictures)
    assert found == _vllm_keys(tokens, 3, extras)


_KEYS_OF_MANY = """
from blocktable._core import BlockHasher
import hashlib
total = hashlib.sha256()
for algorithm in ("blake3", "sha256"):
    hasher = BlockHasher(block_size=4, algorithm=algorithm, seed=b"shared")
    for number in range(500):
        tokens = [number * 31 + i for i in range(17)]
        said = [{}, {"cache_salt": "s"}, {"adapter": ("a", 1)}, {"domain": "d", "public_tokens": 5}, {"media": [(3, 6, "m")]}]
        for key in hasher.keys(tokens, **said[number % 5]):
            total.update(key)
print(total.hexdigest())
"""

GOLDEN = "6c42c3b240c12e0199f415ca79ad4f54698bd00ef9c2227715859cc13d300842"


@PROMISES.row(44, mutants=("key_without_parent",))
def test_keys_are_the_same_in_every_version() -> None:
    """Fault 44: the keys of 1,000 chains are those that were written down."""
    shown = io.StringIO()
    with redirect_stdout(shown):
        exec(_KEYS_OF_MANY, {})
    assert shown.getvalue().strip() == GOLDEN


def test_keys_are_the_same_in_every_process() -> None:
    """Fault 44: the same in 3 fresh processes with different hash seeds of Python."""
    place = {"PYTHONPATH": str(Path(blocktable.__file__).parent.parent)}
    command = [sys.executable, "-c", _KEYS_OF_MANY]
    found = {
        subprocess.run(command, env=place | {"PYTHONHASHSEED": seed}, capture_output=True, text=True, check=True).stdout.strip()
        for seed in ("0", "1", "random")
    }
    assert found == {GOLDEN}


test_a_planted_fault_is_caught = PROMISES.test_of_mutants()
