"""Traffic by its statistics: requests of drawn lengths that arrive at drawn times. For runs whose tokens mean nothing.

The same seed gives the same traffic, and the same lengths at every rate.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np

from enginecore.errors import ParameterError
from enginecore.request import EngineRequest, SamplingParams

#: Mean tokens of prompts and of answers, from Kwon et al., "Efficient Memory Management for Large Language Model
#: Serving with PagedAttention" (2023), figure 11.
PUBLISHED = {"sharegpt": (161.31, 337.99), "alpaca": (19.31, 58.45)}
#: Their spread is not published. Log-normal with this deviation (of the logarithm) has the long tail of chats.
SIGMA = 1.0


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """`lengths` is "sharegpt" or "alpaca" (log-normal with the published means) or "IN:OUT" (all the same). `rate` is
    in requests a second, at Poisson times; None has all there at once. `shared_prefix` tokens come before each prompt's
    own."""

    num_requests: int
    lengths: str = "sharegpt"
    rate: float | None = None
    shared_prefix: int = 0
    seed: int = 0


def draw_requests(traffic: Traffic, *, vocab_size: int, max_model_len: int) -> list[EngineRequest]:
    """The requests in order of arrival. What is longer than `max_model_len` is cut: a prompt to leave room for one
    token, an answer to what is left. Raises ParameterError for lengths that are not understood or cannot fit."""
    lengths_rng, tokens_rng, times_rng = (
        np.random.default_rng(seed) for seed in np.random.SeedSequence(traffic.seed).spawn(3)
    )
    room = max_model_len - traffic.shared_prefix
    if room < 2:
        raise ParameterError(
            f"shared_prefix {traffic.shared_prefix} leaves no room in max_model_len {max_model_len}",
            param="shared_prefix",
        )
    prompts, answers = _lengths(traffic, lengths_rng)
    prompts = np.clip(prompts, 1, room - 1)
    answers = np.clip(answers, 1, room - prompts)
    times = np.zeros(traffic.num_requests)
    if traffic.rate is not None:
        times = np.cumsum(times_rng.exponential(1 / traffic.rate, traffic.num_requests))
    prefix: list[int] = tokens_rng.integers(0, vocab_size, traffic.shared_prefix).tolist()
    requests = []
    for number, (prompt, answer, moment) in enumerate(
        zip(prompts.tolist(), answers.tolist(), times.tolist(), strict=True)
    ):
        tokens: list[int] = tokens_rng.integers(0, vocab_size, prompt).tolist()
        params = SamplingParams(temperature=0, max_tokens=answer, ignore_eos=True)
        requests.append(EngineRequest(f"r{number}", prefix + tokens, params, answer, arrival_time=moment))
    return requests


def _lengths(traffic: Traffic, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    if traffic.lengths in PUBLISHED:
        means = PUBLISHED[traffic.lengths]
        drawn = [rng.lognormal(np.log(mean) - SIGMA**2 / 2, SIGMA, traffic.num_requests) for mean in means]
        return np.rint(drawn[0]).astype(np.int64), np.rint(drawn[1]).astype(np.int64)
    match = re.fullmatch(r"([1-9]\d{0,6}):([1-9]\d{0,6})", traffic.lengths)
    if match is None:
        raise ParameterError(
            f"lengths must be {', '.join(PUBLISHED)} or IN:OUT in tokens such as 512:128, got {traffic.lengths!r}",
            param="lengths",
        )
    prompt, answer = int(match.group(1)), int(match.group(2))
    return np.full(traffic.num_requests, prompt), np.full(traffic.num_requests, answer)
