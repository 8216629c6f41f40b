"""Made-up inputs: the same on every run, with hypothesis and without, and failures come out as they were raised."""

from __future__ import annotations

import sys
from collections.abc import Callable

import pytest
from enginecore.testing.cases.made_up import Draw, made_up

Play = Callable[[Callable[[Draw], None], int], None]


@pytest.fixture(params=["hypothesis", "sampler"])
def play(request: pytest.FixtureRequest) -> Play:
    """`made_up`, with hypothesis hidden for the length of the call or not."""

    def run(attempt: Callable[[Draw], None], examples: int) -> None:
        with pytest.MonkeyPatch.context() as patch:
            if request.param == "sampler":
                patch.setitem(sys.modules, "hypothesis", None)
            made_up(attempt, examples)

    return run


def collect(play: Play) -> list[tuple[int, str]]:
    seen = []

    def attempt(draw: Draw) -> None:
        seen.append((draw.integer(3, 9), draw.choice(["a", "b"])))

    play(attempt, 12)
    return seen


def test_draws_are_within_bounds_and_repeat(play: Play) -> None:
    first = collect(play)
    assert len(first) >= 8
    assert {number for number, _ in first} <= set(range(3, 10))
    assert {letter for _, letter in first} == {"a", "b"}
    assert collect(play) == first


def test_a_failure_comes_out(play: Play) -> None:
    def attempt(draw: Draw) -> None:
        number = draw.integer(0, 100)
        assert number < 20, f"{number} is too large"

    with pytest.raises(AssertionError, match="too large"):
        play(attempt, 50)
