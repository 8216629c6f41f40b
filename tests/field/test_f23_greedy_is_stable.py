"""F23: temperature 0, top_k 1 and the oracle agree, alone and in a batch."""

from __future__ import annotations

from typing import Any

import pytest

from tests.field.answers import both, texts
from tests.serving import ServerProcess

NEAR_TIE = 1e-3
COUNT = 16


@pytest.fixture(scope="module")
def cases(greedy_reference: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The twenty shortest cases."""
    return sorted(greedy_reference, key=lambda case: len(case["prompt_token_ids"]))[:20]


def agree(cases: list[dict[str, Any]], answer: dict[str, Any]) -> None:
    """Every choice is the oracle's, except after a near tie of the best two tokens."""
    assert len(answer["choices"]) == len(cases)
    for case, choice in zip(cases, answer["choices"], strict=True):
        if case["smallest_top2_gap"] > NEAR_TIE:
            assert choice["token_ids"] == case["output_token_ids"][:COUNT], case


def test_in_a_batch_and_with_top_k_1(server: ServerProcess, cases: list[dict[str, Any]]) -> None:
    body = {"prompt": [case["prompt_token_ids"] for case in cases], "max_tokens": COUNT, "return_token_ids": True}
    for sampling in ({"temperature": 0}, {"temperature": 1.7, "top_k": 1}):
        agree(cases, server.complete(**body, **sampling))


def test_alone(server: ServerProcess, cases: list[dict[str, Any]]) -> None:
    for case in cases[::5]:
        prompt = case["prompt_token_ids"]
        answer = server.complete(prompt=prompt, max_tokens=COUNT, return_token_ids=True, cache_salt="alone")
        agree([case], answer)


@pytest.mark.parametrize("n", [3])
def test_n_greedy_choices_are_equal(server: ServerProcess, n: int) -> None:
    answer = both(server, choices=n, prompt="The capital of France is", temperature=0, n=n, max_tokens=8)
    assert len(set(texts(answer))) == 1
