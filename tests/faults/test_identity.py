"""Identity of content (catalogue 40, 43, 44): a key names all tokens before it, and is the same in every process."""

import io
import subprocess
import sys
from collections.abc import Callable
from contextlib import redirect_stdout
from typing import Any

import pytest

from blocktable._core import BlockHasher
from tests.faults.promises import Promises
from tests.faults.scene import prompt, scene

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


_KEYS_OF_MANY = """
from blocktable._core import BlockHasher
import hashlib
total = hashlib.sha256()
for algorithm in ("blake3", "sha256"):
    hasher = BlockHasher(block_size=4, algorithm=algorithm, seed=b"shared")
    for number in range(500):
        for key in hasher.keys([number * 31 + i for i in range(17)]):
            total.update(key)
print(total.hexdigest())
"""

GOLDEN = "03885433ec59b99f87c520a8892c4bdac61f309aa2e50c302a992e58eb2c3400"


@PROMISES.row(44, mutants=("key_without_parent",))
def test_keys_are_the_same_in_every_version() -> None:
    """Fault 44: the keys of 1,000 chains are those that were written down."""
    shown = io.StringIO()
    with redirect_stdout(shown):
        exec(_KEYS_OF_MANY, {})
    assert shown.getvalue().strip() == GOLDEN


def test_keys_are_the_same_in_every_process() -> None:
    """Fault 44: the same in 3 fresh processes with different hash seeds of Python."""
    found = {
        subprocess.run(
            [sys.executable, "-c", _KEYS_OF_MANY], env={"PYTHONHASHSEED": seed}, capture_output=True, text=True, check=True
        ).stdout.strip()
        for seed in ("0", "1", "random")
    }
    assert found == {GOLDEN}


test_a_planted_fault_is_caught = PROMISES.test_of_mutants()
