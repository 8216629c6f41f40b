from __future__ import annotations

from typing import Any

import pytest
from enginecore.errors import ParameterError
from enginecore.frontend.bad_words import MAX_SPELLINGS, banned_sequences
from enginecore.frontend.detokenizer import TokenTable
from enginecore.frontend.input_processor import InputProcessor, PreparedRequest
from enginecore.request import SamplingParams

from tests.frontend.toy import ToyTokenizer, config

TOKENIZER = ToyTokenizer()
TABLE = TokenTable(TOKENIZER)


def process(prompt: Any, clamp: bool = True, settings: dict[str, Any] | None = None, **params: Any) -> PreparedRequest:
    special = {name: params.pop(name) for name in ("priority", "cache_salt") if name in params}
    inputs = InputProcessor(config(**(settings or {})), TOKENIZER, TABLE)
    return inputs.process(prompt, SamplingParams(**params), clamp=clamp, **special)


@pytest.mark.parametrize(
    ("prompt", "ids"),
    [
        ("the world", [261, 258]),
        ([1, 2, 3], [1, 2, 3]),
        ({"prompt": "the"}, [261]),
        ({"prompt_token_ids": [5]}, [5]),
    ],
)
def test_prompt_forms(prompt: Any, ids: list[int]) -> None:
    assert process(prompt).token_ids == ids


@pytest.mark.parametrize(
    ("prompt", "word"),
    [
        ("", "empty"), ([], "empty"), (5, "int"), ({"text": "x"}, "prompt_token_ids"), ([1, "2"], "'2'"),
        ([True], "True"), ([-1], "-1"), ([274], "274"), ([2**63], str(2**63)), ([10**400], "over 20 digits"),
        ("\ud800", "surrogate"),
    ],
)  # fmt: skip
def test_bad_prompts(prompt: Any, word: str) -> None:
    with pytest.raises(ParameterError, match=word) as caught:
        process(prompt)
    assert caught.value.param == "prompt"


def test_length_errors_have_exact_numbers() -> None:
    with pytest.raises(ParameterError, match=r"length is 64 tokens.*65 tokens") as caught:
        process([1] * 65)
    assert caught.value.code == "context_length_exceeded"
    with pytest.raises(ParameterError, match="64 tokens and 1 output tokens"):
        process([1] * 64, max_tokens=1)
    with pytest.raises(ParameterError, match="60 tokens and 5 output tokens") as caught:
        process([1] * 60, clamp=False, max_tokens=5)
    assert caught.value.param == "max_tokens"
    with pytest.raises(ParameterError, match=r"10000 characters, which is at least \d+ tokens"):
        process("x" * 10_000)


def test_max_tokens() -> None:
    assert process([1] * 60, max_tokens=None).max_tokens == 4
    assert process([1] * 60, max_tokens=100).max_tokens == 4
    assert process([1] * 60, clamp=False, max_tokens=4).max_tokens == 4
    assert process([1] * 64, max_tokens=0).max_tokens == 0
    with pytest.raises(ParameterError, match="only 4 tokens can be generated"):
        process([1] * 60, max_tokens=None, min_tokens=5)


def test_truncation_keeps_the_last_tokens() -> None:
    kept = process("abcthe world", truncate_prompt_tokens=2)
    assert kept.token_ids == [261, 258] and kept.text is None
    assert process("the", truncate_prompt_tokens=5).text == "the"
    assert process(list(range(200)), truncate_prompt_tokens=-1, max_tokens=10).token_ids == list(range(146, 200))
    assert len(process("x" * 10_000, truncate_prompt_tokens=7).token_ids) == 7


@pytest.mark.parametrize(
    ("params", "field"),
    [
        ({"logprobs": 6}, "logprobs"), ({"prompt_logprobs": 6}, "prompt_logprobs"),
        ({"stop_token_ids": [274]}, "stop_token_ids"),
        ({"allowed_token_ids": [999]}, "allowed_token_ids"), ({"logit_bias": {274: 1.0}}, "logit_bias"),
        ({"stop": "x", "detokenize": False}, "stop"), ({"stop": "x" * 20_000}, "stop"), ({"priority": 1}, "priority"),
        ({"priority": 2**63}, "priority"), ({"cache_salt": ""}, "cache_salt"), ({"cache_salt": 5}, "cache_salt"),
        ({"cache_salt": "x" * 2000}, "cache_salt"),
    ],
)  # fmt: skip
def test_bad_parameters(params: dict[str, Any], field: str) -> None:
    with pytest.raises(ParameterError) as caught:
        process("the", **params)
    assert caught.value.param == field


def test_priority_is_accepted_under_its_policy() -> None:
    assert process("the", settings={"scheduling_policy": "priority"}, priority=-(2**63)).priority == -(2**63)


def test_bad_words_in_every_spelling() -> None:
    sequences = banned_sequences(TOKENIZER, TABLE, ["Paris"])
    written = [b"|".join(TABLE.raw(token) for token in ids) for ids in sequences]
    assert written[0] == b"Paris" and b" Paris" in written and b" Par|is" in written and b" |Paris" in written
    assert len(sequences) == len({tuple(ids) for ids in sequences}) <= 2 * (MAX_SPELLINGS + 1)


def test_internal_ids_are_unique() -> None:
    inputs = [InputProcessor(config(), TOKENIZER, TABLE) for _ in range(2)]
    assert len({each.internal_id() for each in inputs for _ in range(100)}) == 200
