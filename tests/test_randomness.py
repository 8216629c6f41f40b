"""Random numbers are a function of seed and position: fixed values, evenly spread, no two streams alike."""

from __future__ import annotations

import numpy as np
from enginecore.randomness import request_seed, uniforms


def splitmix(seed: int, position: int) -> float:
    mask = (1 << 64) - 1
    z = (seed + (position + 1) * 0x9E3779B97F4A7C15) & mask
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
    return ((z ^ (z >> 31)) >> 11) / 2**53


def draw(seed: int, count: int) -> np.ndarray:
    return uniforms(np.full(count, seed % 2**64, np.uint64), np.arange(count, dtype=np.uint64))


def test_equals_the_published_function_in_plain_integers() -> None:
    for seed in (0, 1, 42, 2**63 - 1, 2**64 - 1):
        assert draw(seed, 5).tolist() == [splitmix(seed, i) for i in range(5)]
    assert splitmix(0, 0) == (0xE220A8397B1DCDAF >> 11) / 2**53, "the first output of splitmix64 with seed 0"


def test_one_number_does_not_depend_on_the_others() -> None:
    seeds, positions = np.array([3, 9, 3], np.uint64), np.array([7, 0, 1], np.uint64)
    together = uniforms(seeds, positions)
    for i in range(3):
        assert uniforms(seeds[i : i + 1], positions[i : i + 1])[0] == together[i]


def test_uniform() -> None:
    numbers = np.concatenate([draw(seed, 1000) for seed in range(100)])
    assert numbers.min() >= 0 and numbers.max() < 1
    counts = np.histogram(numbers, bins=100, range=(0, 1))[0]
    assert ((counts - 1000) ** 2 / 1000).sum() < 160, "chi-square of 99 degrees of freedom, p about 1e-4"


def test_first_numbers_of_neighbouring_seeds_are_unrelated() -> None:
    """n > 1 uses seed, seed + 1, ...: their first tokens must not move together."""
    first = uniforms(np.arange(20_000, dtype=np.uint64), np.zeros(20_000, np.uint64))
    assert abs(np.corrcoef(first[:-1], first[1:])[0, 1]) < 0.03
    assert abs(first.mean() - 0.5) < 0.01


def test_seeds_of_requests_without_one() -> None:
    seeds = {request_seed(engine, arrival) for engine in range(30) for arrival in range(200)}
    assert len(seeds) == 6000 and all(0 <= seed < 2**64 for seed in seeds)
    assert request_seed(-1, 5) == request_seed(2**64 - 1, 5)
