"""Inputs that a machine thinks up: hypothesis where it is installed (it shrinks what fails), else a seeded sampler.

Both are deterministic: the same shapes on every run.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

T = TypeVar("T")


class Draw(Protocol):
    def integer(self, low: int, high: int) -> int:
        """From low to high, both included."""

    def choice(self, options: Sequence[T]) -> T: ...


class _Sampler:
    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def integer(self, low: int, high: int) -> int:
        return self._random.randint(low, high)

    def choice(self, options: Sequence[T]) -> T:
        return self._random.choice(options)


def made_up(attempt: Callable[[Draw], None], examples: int) -> None:
    """Call `attempt` with `examples` different draws; the failure that comes out is the smallest one found."""
    try:
        from hypothesis import HealthCheck, Phase, given, settings
        from hypothesis import strategies as st
    except ImportError:
        for seed in range(examples):
            attempt(_Sampler(seed))
        return

    class FromHypothesis:
        def __init__(self, data: Any) -> None:
            self._data = data

        def integer(self, low: int, high: int) -> int:
            drawn: int = self._data.draw(st.integers(low, high))
            return drawn

        def choice(self, options: Sequence[T]) -> T:
            drawn: T = self._data.draw(st.sampled_from(list(options)))
            return drawn

    @settings(
        max_examples=examples, derandomize=True, database=None, deadline=None, print_blob=False,
        report_multiple_bugs=False, suppress_health_check=list(HealthCheck), phases=(Phase.generate, Phase.shrink),
    )  # fmt: skip
    @given(st.data())
    def search(data: Any) -> None:
        attempt(FromHypothesis(data))

    search()
