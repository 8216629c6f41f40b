"""The real model where a prompt takes over computed tokens: inside a block, up to its last token, from an answer.

What is reused must not be seen in the answers, whose tokens are those of a model that computes everything.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from enginecore import LLM, SamplingParams

pytestmark = pytest.mark.model


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM("smollm2-135m", device="cpu", dtype="float32", max_model_len=256, num_blocks=256, seed=0) as llm:
        yield llm


def answer(llm: LLM, prompt: list[int], *, read: bool, count: int = 12) -> tuple[list[int], int]:
    """(tokens, how many of the prompt's were reused) of the greedy answer."""
    params = SamplingParams(temperature=0, max_tokens=count, skip_reading_prefix_cache=not read)
    (output,) = llm.generate({"prompt_token_ids": prompt}, params, use_tqdm=False)
    return output.outputs[0].token_ids, output.num_cached_tokens


@pytest.mark.parametrize(("common", "reused"), [(16, 16), (18, 16), (20, 20), (23, 23), (31, 31), (32, 32), (37, 37)])
def test_prompts_that_part_at_any_token(
    llm: LLM, greedy_reference: list[dict[str, Any]], common: int, reused: int
) -> None:
    """Fewer than four tokens of a block in common are not worth a copy."""
    known, other = (greedy_reference[i]["prompt_token_ids"] for i in (0, 1))
    llm.reset_prefix_cache()
    long = [*known, *known, *known]
    answer(llm, long[:60], read=False)
    prompt = [*long[:common], 1234, *other[:12]]
    before = llm._client.call("stats").copied_tokens
    found, cached = answer(llm, prompt, read=True)
    assert cached == reused and llm._client.call("stats").copied_tokens - before == reused % 16
    assert found == answer(llm, prompt, read=False)[0]


def test_the_same_prompt_of_whole_blocks(llm: LLM, greedy_reference: list[dict[str, Any]]) -> None:
    prompt = greedy_reference[2]["prompt_token_ids"][:32]
    alone, _ = answer(llm, prompt, read=False)
    for _ in range(2):
        assert answer(llm, prompt, read=True) == (alone, 31), "all but the last token, whose block is not written again"


def test_the_next_turn_of_a_chat_reuses_the_answer(llm: LLM, greedy_reference: list[dict[str, Any]]) -> None:
    prompt = greedy_reference[3]["prompt_token_ids"]
    first, _ = answer(llm, prompt, read=True, count=40)
    turn = [*prompt, *first, *greedy_reference[4]["prompt_token_ids"][-20:]]
    computed = len(prompt) + len(first) - 1
    found, cached = answer(llm, turn, read=True)
    assert cached == computed - computed % 16 > len(prompt), "every full block of the answer is found"
    assert found == answer(llm, turn, read=False)[0]
