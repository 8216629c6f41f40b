"""Drawn traffic: the statistics that are asked for, and the same by the same seed."""

from __future__ import annotations

import statistics
from dataclasses import replace
from itertools import pairwise

import pytest
from enginecore.cli.bench_traffic import PUBLISHED, Traffic, draw_requests
from enginecore.errors import ParameterError
from enginecore.request import EngineRequest


def draw(traffic: Traffic, max_model_len: int = 8192) -> list[EngineRequest]:
    return draw_requests(traffic, vocab_size=1000, max_model_len=max_model_len)


def test_the_same_seed_gives_the_same_requests() -> None:
    traffic = Traffic(num_requests=50, rate=3.0, seed=7)
    assert draw(traffic) == draw(traffic)
    other = draw(replace(traffic, seed=8))
    assert [r.prompt_token_ids for r in other] != [r.prompt_token_ids for r in draw(traffic)]


def test_lengths_and_tokens_do_not_depend_on_the_rate() -> None:
    slow, fast, once = (draw(Traffic(num_requests=50, rate=rate)) for rate in (1.0, 100.0, None))
    prompts = [[r.prompt_token_ids for r in requests] for requests in (slow, fast, once)]
    assert prompts[0] == prompts[1] == prompts[2]
    assert all(r.arrival_time == 0 for r in once)
    assert [r.arrival_time for r in slow] == pytest.approx([100 * r.arrival_time for r in fast])


def test_arrivals_are_poisson() -> None:
    """Gaps of a Poisson process have mean 1 / rate and a deviation that equals it."""
    times = [r.arrival_time for r in draw(Traffic(num_requests=4000, rate=20.0, lengths="1:1"))]
    gaps = [later - sooner for sooner, later in pairwise(times)]
    assert times == sorted(times) and min(gaps) > 0
    assert statistics.fmean(gaps) == pytest.approx(1 / 20, rel=0.05)
    assert statistics.stdev(gaps) == pytest.approx(1 / 20, rel=0.08)


@pytest.mark.parametrize("lengths", PUBLISHED)
def test_published_means(lengths: str) -> None:
    requests = draw(Traffic(num_requests=4000, lengths=lengths))
    assert statistics.fmean(len(r.prompt_token_ids) for r in requests) == pytest.approx(PUBLISHED[lengths][0], rel=0.06)
    assert statistics.fmean(r.max_tokens for r in requests) == pytest.approx(PUBLISHED[lengths][1], rel=0.06)


def test_everything_fits_and_the_prefix_is_shared() -> None:
    requests = draw(Traffic(num_requests=500, shared_prefix=40), max_model_len=256)
    assert max(len(r.prompt_token_ids) + r.max_tokens for r in requests) == 256
    assert min(r.max_tokens for r in requests) >= 1
    assert len({tuple(r.prompt_token_ids[:40]) for r in requests}) == 1
    assert all(len(r.prompt_token_ids) > 40 for r in requests)


def test_fixed_lengths() -> None:
    requests = draw(Traffic(num_requests=3, lengths="512:128"))
    assert {(len(r.prompt_token_ids), r.max_tokens) for r in requests} == {(512, 128)}


@pytest.mark.parametrize("lengths", ["", "12", "0:5", "5:0", "1:2:3", "-1:4", "1.5:2", "chat", "9" * 9 + ":1"])
def test_lengths_that_mean_nothing(lengths: str) -> None:
    with pytest.raises(ParameterError, match="lengths must be sharegpt, alpaca or IN:OUT"):
        draw(Traffic(num_requests=1, lengths=lengths))


def test_a_prefix_that_leaves_no_room() -> None:
    with pytest.raises(ParameterError, match="leaves no room"):
        draw(Traffic(num_requests=1, shared_prefix=255), max_model_len=256)
