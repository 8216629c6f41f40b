"""F19: a row's sampling parameters act on that row only, whatever else is in the batch."""

from __future__ import annotations

import functools
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from enginecore import LLM, SamplingParams
from enginecore_sim import candidates

from tests.field.support import VOCAB, Solo, baseline, together, token_prompt
from tests.serving import ServerProcess

COUNT, ORDERS = 16, 5
#: A few tokens that outdo the scripted ones, so that penalties decide between them. 0 is what padding would look like.
FAVOURED = {0: 40.0, 20: 39.25, 21: 38.5, 22: 37.5, 23: 36.25}

KINDS: list[dict[str, Any]] = [
    {},
    {"repetition_penalty": 1.5, "logit_bias": FAVOURED},
    {"presence_penalty": 2.0, "logit_bias": FAVOURED},
    {"frequency_penalty": 2.0, "logit_bias": FAVOURED},
    {"logit_bias": {**FAVOURED, 77: 41.0}},
    {"temperature": 4.0, "min_p": 0.2, "seed": 7},
    {"temperature": 5.0, "top_k": 1, "seed": 8},
    {"allowed_token_ids": [3, 5, 8, 13], "logit_bias": {13: 1.0, 5: 0.5}, "frequency_penalty": 0.4},
]
#: Of different lengths, so that a padded batch would have padding. Tokens 20 and 21 are in the prompts.
PROMPTS = [[20, 21, *token_prompt(1900 + index, 5 + 7 * index)] for index in range(len(KINDS))]


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(device="sim", max_model_len=256, num_blocks=256, max_num_seqs=16) as llm:
        yield llm


def _generate(llm: LLM, rows: list[int]) -> dict[int, list[int]]:
    params = [
        SamplingParams(**{"temperature": 0, "max_tokens": COUNT, "ignore_eos": True, **KINDS[row]}) for row in rows
    ]
    outputs = llm.generate([PROMPTS[row] for row in rows], params, use_tqdm=False)
    return {row: list(output.outputs[0].token_ids) for row, output in zip(rows, outputs, strict=True)}


def _reference(prompt: list[int], params: dict[str, Any]) -> list[int]:
    """Greedy with penalties in plain numpy: repetition counts prompt and output, the other two the output."""
    tokens = list(prompt)
    for _ in range(COUNT):
        logits = np.zeros(VOCAB)
        best = candidates(tokens, VOCAB)
        logits[best] = 16.0 - 2 * np.arange(len(best))
        if "allowed_token_ids" in params:
            kept = np.full(VOCAB, -np.inf)
            kept[params["allowed_token_ids"]] = logits[params["allowed_token_ids"]]
            logits = kept
        for token, bias in params.get("logit_bias", {}).items():
            logits[token] += bias
        seen, factor = list(set(tokens)), params.get("repetition_penalty", 1.0)
        logits[seen] = np.where(logits[seen] > 0, logits[seen] / factor, logits[seen] * factor)
        counts = np.bincount(tokens[len(prompt) :], minlength=VOCAB)
        logits -= params.get("frequency_penalty", 0) * counts + params.get("presence_penalty", 0) * (counts > 0)
        tokens.append(int(logits.argmax()))
    return tokens[len(prompt) :]


def test_greedy_rows_match_a_plain_reference(llm: LLM) -> None:
    rows = [row for row, kind in enumerate(KINDS) if kind.get("temperature", 0) == 0 or kind.get("top_k") == 1]
    got = _generate(llm, rows)
    for row in rows:
        assert got[row] == _reference(PROMPTS[row], KINDS[row]), KINDS[row]
    assert all(len(set(got[row])) > 1 for row in (1, 2, 3)), "penalties made a difference"


def test_any_order_gives_the_solo_answers(llm: LLM) -> None:
    alone: dict[int, list[int]] = {}
    for row in range(len(KINDS)):
        alone.update(_generate(llm, [row]))
    for order in range(ORDERS):
        rows = list(range(len(KINDS)))
        random.Random(order).shuffle(rows)
        assert _generate(llm, rows) == alone
        assert _generate(llm, rows[: len(rows) // 2]) == {row: alone[row] for row in rows[: len(rows) // 2]}


@pytest.mark.model
def test_the_real_model(server: ServerProcess, solo: Solo) -> None:
    kinds: list[dict[str, Any]] = [
        {},
        {"repetition_penalty": 1.5},
        {"presence_penalty": 2.0},
        {"frequency_penalty": 2.0},
        {"logit_bias": {"260": -100, "28": 5}},
        {"temperature": 1.0, "min_p": 0.2, "seed": 7},
        {"temperature": 1.5, "top_k": 1},
        {"allowed_token_ids": [260, 253, 28, 284, 30]},
    ]
    prompt = "The sea is blue, the sea is wide, the sea is"
    alone = [solo(prompt=prompt, max_tokens=8, **kind)["choices"][0]["text"] for kind in kinds]
    assert len(set(alone)) >= 5, "the parameters make a difference"
    for order in range(2):
        rows = list(range(len(kinds)))
        random.Random(order).shuffle(rows)
        answers = together([functools.partial(server.complete, prompt=prompt, max_tokens=8, **kinds[r]) for r in rows])
        assert [answer["choices"][0]["text"] for answer in answers] == [alone[row] for row in rows]
    baseline(server)
