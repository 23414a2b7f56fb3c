"""Random numbers are a function of (seed, child, position), equal to the published generator, and evenly spread."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from blocktable.sampling import random_numbers as module
from blocktable.sampling.random_numbers import SeedSource, philox, random_bits, uniforms

SEEDS = st.integers(-(2**63), 2**63 - 1)


def words(*values: int) -> list[np.ndarray]:
    return [np.array([value], dtype=np.uint64) for value in values]


# Counter, key and result of philox4x32-10, from the known-answer tests of the Random123 library.
KNOWN = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


@pytest.mark.parametrize("counter, key, result", KNOWN)
def test_the_generator_gives_the_published_numbers(
    counter: tuple[int, ...], key: tuple[int, ...], result: tuple[int, ...]
) -> None:
    got = philox(tuple(words(*counter)), tuple(words(*key)))  # type: ignore[arg-type]
    assert [int(word[0]) for word in got] == list(result)


def test_one_round_less_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_ROUNDS", 9)
    for known in KNOWN:
        with pytest.raises(AssertionError):
            test_the_generator_gives_the_published_numbers(*known)


def test_a_number_is_what_the_docstring_says() -> None:
    seed, position, child = -5, 7, 2
    low, high = (seed % 2**64) & 0xFFFFFFFF, (seed % 2**64) >> 32
    first, second, _, _ = philox(tuple(words(position, child, 0, 0)), tuple(words(low, high)))  # type: ignore[arg-type]
    number = uniforms(np.array([seed]), np.array([position]), child=child)[0]
    assert number == ((int(first[0]) << 32 | int(second[0])) >> 11) * 2.0**-53


@given(entries=st.lists(st.tuples(SEEDS, st.integers(0, 2**31)), min_size=1, max_size=20))
def test_a_number_does_not_depend_on_its_neighbours(entries: list[tuple[int, int]]) -> None:
    seeds, positions = (np.array(column, dtype=np.int64) for column in zip(*entries))
    together = uniforms(seeds, positions)
    alone = [uniforms(seeds[i : i + 1], positions[i : i + 1])[0] for i in range(len(entries))]
    assert together.tolist() == alone
    assert ((together >= 0.0) & (together < 1.0)).all()


def test_seeds_children_and_positions_all_count() -> None:
    seeds = np.array([0, 1, 2**32, -1, 2**63 - 1, -(2**63)], dtype=np.int64)
    bits = {
        int(value)
        for position in (0, 1, 2**31, 2**32 - 1)
        for child in (0, 1)
        for domain in (0, 1)
        for value in random_bits(seeds, np.full(6, position), child=child, domain=domain)
    }
    assert len(bits) == 6 * 4 * 2 * 2


@pytest.mark.parametrize("along", ["positions", "seeds"])
def test_numbers_are_evenly_spread(along: str) -> None:
    many, one = np.arange(200_000, dtype=np.int64), np.zeros(200_000, dtype=np.int64)
    numbers = uniforms(one + 3, many) if along == "positions" else uniforms(many, one + 3)
    counts = np.histogram(numbers, bins=100, range=(0.0, 1.0))[0]
    chi_square = ((counts - 2000.0) ** 2 / 2000.0).sum()
    assert 55 < chi_square < 150  # 99 degrees of freedom: outside this once in a million
    assert abs(np.corrcoef(numbers[:-1], numbers[1:])[0, 1]) < 0.01


def test_drawn_seeds_follow_from_the_engines_seed_alone() -> None:
    first, again, other = SeedSource(5), SeedSource(5), SeedSource(6)
    drawn = [first.draw() for _ in range(100)]
    assert [again.draw() for _ in range(100)] == drawn
    assert len(set(drawn)) == 100
    assert not set(drawn) & {other.draw() for _ in range(100)}
    assert all(0 <= seed < 2**63 for seed in drawn)
    assert SeedSource(None).draw() != SeedSource(None).draw()
