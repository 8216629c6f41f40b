"""F20: speculation changes no text, no log-probability and no structure, and says how often it was right."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from enginecore import LLM, SamplingParams
from enginecore.errors import ParameterError
from enginecore.runner.guessing import StepCost

SETTINGS: dict[str, Any] = {"device": "cpu", "dtype": "float32", "max_model_len": 512, "num_blocks": 128}
LIST = "red apple, green pear, blue plum, red apple, green pear, blue plum, red apple, green pear,"
PROMPTS = [
    LIST,
    "def add(a, b):\n    return a + b\n\ndef add_three(a, b, c):\n    return a +",
    "one two three four one two three four one two three",
    "The capital of France is",
    "0 1 2 3 4 5 6 7 8 9 0 1 2 3 4 5 6",
    "<a><b></b></a><a><b></b></a><a><b>",
]
GREEDY: dict[str, Any] = {"temperature": 0, "ignore_eos": True}
SCHEMA = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"], "additionalProperties": False}
KINDS: list[dict[str, Any]] = [
    *({**GREEDY, "max_tokens": count} for count in (1, 2, 3, 5)),
    {**GREEDY, "max_tokens": 24, "logprobs": 5},
    {**GREEDY, "max_tokens": 24, "stop": [" plum", "return", "3"]},
    {"temperature": 0.8, "seed": 11, "max_tokens": 16, "n": 2},
    {**GREEDY, "max_tokens": 12, "repetition_penalty": 1.2, "frequency_penalty": 0.5},
    {**GREEDY, "max_tokens": 12, "logit_bias": {28: 3.0}, "min_tokens": 6},
    {"temperature": 1.0, "seed": 5, "max_tokens": 24, "structured_outputs": {"json": SCHEMA}},
]


def load(**settings: Any) -> LLM:
    return LLM("smollm2-135m", **{**SETTINGS, **settings})


@pytest.fixture(scope="module")
def plain(smollm2: str) -> Iterator[list[Any]]:
    """What every kind of request answers to every prompt without speculation."""
    with load(speculation="off") as llm:
        yield [answers(llm, kind) for kind in KINDS]


def answers(llm: LLM, kind: dict[str, Any]) -> list[Any]:
    outputs = llm.generate(PROMPTS, SamplingParams(**kind), use_tqdm=False)
    return [
        (each.text, each.token_ids, each.finish_reason, each.stop_reason, each.logprobs)
        for output in outputs
        for each in output.outputs
    ]


@pytest.mark.model
@pytest.mark.parametrize("settings", [{}, {"num_blocks": 40, "max_num_batched_tokens": 16, "max_num_seqs": 8},
                                      {"enable_prefix_caching": False}], ids=["roomy", "tiny", "uncached"])  # fmt: skip
def test_answers_are_those_without_it(
    plain: list[Any], settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(StepCost, "relative_slope", lambda self, rows: 0.0)  # every guess is made, whatever it costs
    with load(speculation="ngram", num_speculative_tokens=3, **settings) as llm:
        for kind, wanted in zip(KINDS, plain, strict=True):
            assert answers(llm, kind) == wanted, kind
        stats = llm._client.call("stats")
        assert 0 < stats.num_accepted < stats.num_drafted and stats.num_used_blocks == 0
        assert stats.num_steps < stats.generation_tokens
    for text, *_ in plain[-1]:
        assert json.loads(text).keys() == {"n"}


@pytest.mark.model
def test_guesses_are_made_by_default_where_they_pay(plain: list[Any], smollm2: str) -> None:
    with load() as llm:
        assert answers(llm, KINDS[4]) == plain[4]
        stats = llm._client.call("stats")
        assert stats.num_accepted > 0
        assert llm.config.speculation == "ngram"


def test_settings_that_make_no_sense_are_refused() -> None:
    for settings, field in (({"speculation": "guess"}, "speculation"), ({"num_speculative_tokens": 0}, "at least 1"),
                            ({"num_speculative_tokens": 33}, "at most 32")):  # fmt: skip
        with pytest.raises(ParameterError, match=field):
            load(**settings)
