"""Randomness without state: a number is a function of a request's seed and the position it is for.

So a seeded request gives the same tokens whatever else runs, and nothing has to be saved when it is preempted.
The mixing function is splitmix64 (Steele, Lea, Flood 2014).
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

_MASK = (1 << 64) - 1
_GAMMA = 0x9E3779B97F4A7C15


def _mix(z: int) -> int:
    z = (z + _GAMMA) & _MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return z ^ (z >> 31)


def request_seed(engine_seed: int, arrival: int) -> int:
    """The seed of a request that brought none: reproducible for the same engine seed and order of arrival."""
    return _mix(_mix(engine_seed & _MASK) ^ arrival)


def uniforms(seeds_R: npt.NDArray[np.uint64], positions_R: npt.NDArray[np.uint64]) -> npt.NDArray[np.float64]:
    """One number in [0, 1) for each (seed, position)."""
    with np.errstate(over="ignore"):
        z = seeds_R + (positions_R + np.uint64(1)) * np.uint64(_GAMMA)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        z = z ^ (z >> np.uint64(31))
    numbers: npt.NDArray[np.float64] = (z >> np.uint64(11)).astype(np.float64) * 2.0**-53
    return numbers
