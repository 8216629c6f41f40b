"""F33: echo with logprobs covers prompt and answer, aligned with the text (`both` checks lengths, nulls, offsets)."""

from __future__ import annotations

from typing import Any

import pytest

from tests.field.answers import both, text, texts, tokens_of
from tests.serving import ServerProcess

#: Of the reference's figures; the reference is the transformers library in float32.
TOLERANCE = 1e-3


@pytest.mark.parametrize("max_tokens", [0, 3])
@pytest.mark.parametrize("prompt", ["Once upon a time", "naïve 😀 日本 café"])
def test_text_and_token_prompts(server: ServerProcess, prompt: str, max_tokens: int) -> None:
    body: dict[str, Any] = {"temperature": 0, "echo": True, "logprobs": 2, "max_tokens": max_tokens}
    ids = tokens_of(server, prompt)
    for form in (prompt, ids):
        answer = both(server, prompt=form, **body)
        assert text(answer) == prompt if max_tokens == 0 else text(answer).startswith(prompt)
        assert len(answer["choices"][0]["logprobs"]["tokens"]) == len(ids) + max_tokens
        assert answer["usage"]["completion_tokens"] == max_tokens
        assert answer["choices"][0]["finish_reason"] == "length"


def test_each_choice_echoes_its_own_prompt(server: ServerProcess) -> None:
    prompts = ["One two", "Eins zwei drei"]
    answer = both(server, choices=4, prompt=prompts, n=2, temperature=1, seed=3, echo=True, logprobs=1, max_tokens=3)
    assert [found.startswith(prompts[index // 2]) for index, found in enumerate(texts(answer))] == [True] * 4


def test_values_are_the_oracles(server: ServerProcess, greedy_reference: list[dict[str, Any]]) -> None:
    """The oracle's answer, echoed as a prompt, has the log-probabilities that the oracle gave it."""
    for case in greedy_reference[:1] + greedy_reference[12:15]:
        count = len(case["top5"])
        ids = case["prompt_token_ids"] + case["output_token_ids"][:count]
        for _ in range(2):  # the second time the blocks are in the prefix cache
            answer = server.complete(prompt=ids, max_tokens=0, echo=True, prompt_logprobs=5)
            found = answer["choices"][0]["prompt_logprobs"]
            assert len(found) == len(ids) and found[0] is None
            for expected, position in zip(case["top5"], found[-count:], strict=True):
                values = {int(token): each["logprob"] for token, each in position.items()}
                for token, logprob in expected:
                    assert values[token] == pytest.approx(logprob, abs=TOLERANCE)
