"""The random numbers of sampling: a function of (seed, child, output position), and of nothing else.

Before: a request's `seed`, or one that `SeedSource` draws for it once. After: `sampler.py` turns each number into a token.
There is no state to advance, so a number cannot depend on neighbours, on preemption, on how prompts were cut, on the
device, or on what was drawn before. It is Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3",
2011) with key = the seed's 64 bits and counter = (position, child, domain, 0).
"""

from __future__ import annotations

import secrets
from itertools import count

import numpy as np
from numpy.typing import NDArray

_LOW = np.uint64(0xFFFFFFFF)
_WORD = np.uint64(32)
_MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
_KEY_STEPS = (np.uint64(0x9E3779B9), np.uint64(0xBB67AE85))
_ROUNDS = 10

TOKENS = 0
"""Counter domain of the numbers that choose tokens."""
SEEDS = 1
"""Counter domain of the seeds that an engine draws for requests without one."""

Words = NDArray[np.uint64]  # [K], each below 2**32


def philox(counter: tuple[Words, Words, Words, Words], key: tuple[Words, Words]) -> tuple[Words, Words, Words, Words]:
    """Philox4x32-10 of K counters and keys at once; every argument and result holds 32-bit words in [K] uint64."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        first, second = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]  # below 2**64: nothing is lost
        c0, c1, c2, c3 = (second >> _WORD) ^ c1 ^ k0, second & _LOW, (first >> _WORD) ^ c3 ^ k1, first & _LOW
        k0, k1 = (k0 + _KEY_STEPS[0]) & _LOW, (k1 + _KEY_STEPS[1]) & _LOW
    return c0, c1, c2, c3


def random_bits(seeds: NDArray[np.int64], positions: NDArray[np.int64], *, child: int = 0, domain: int = TOKENS) -> Words:
    """[K] uint64, 64 random bits for each seed [K] at its position [K] (0..2**32 - 1)."""
    key = seeds.view(np.uint64)
    place = positions.astype(np.uint64)
    still = np.zeros_like(place)
    counter = (place, still + np.uint64(child), still + np.uint64(domain), still)
    high, low, _, _ = philox(counter, (key & _LOW, key >> _WORD))
    return (high << _WORD) | low


def uniforms(seeds: NDArray[np.int64], positions: NDArray[np.int64], *, child: int = 0) -> NDArray[np.float64]:
    """[K] float64 in [0, 1), multiples of 2**-53: one for each seed [K] at its output position [K]."""
    bits = random_bits(seeds, positions, child=child)
    return (bits >> np.uint64(11)).astype(np.float64) * 2.0**-53


class SeedSource:
    """Draws seeds for requests that bring none: the i-th one of an engine is a function of (engine's seed, i).

    Safe to call from several threads.
    """

    def __init__(self, seed: int | None) -> None:
        """`seed`: any whole number, of which 64 bits count; None takes one from the operating system."""
        bits = secrets.randbits(64) if seed is None else seed % 2**64
        self._key = np.array([bits], dtype=np.uint64).view(np.int64)
        self._numbers = count()

    def draw(self) -> int:
        """The next seed, 0..2**63 - 1."""
        place = np.array([next(self._numbers)], dtype=np.int64)
        return int(random_bits(self._key, place, domain=SEEDS)[0] >> np.uint64(1))
