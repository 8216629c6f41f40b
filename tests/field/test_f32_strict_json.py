"""F32: no NaN and no Infinity ever, whatever is impossible. (`both` reads answers with a strict parser.)"""

from __future__ import annotations

import functools
from typing import Any

import pytest

from tests.field.answers import both, tokens_of, user
from tests.field.support import CHAT, together
from tests.serving import ServerProcess


@pytest.mark.parametrize("path", ["completions", "chat"])
def test_restricted_sampling_with_logprobs(server: ServerProcess, path: str) -> None:
    yes, no = tokens_of(server, " yes no")
    narrow: list[dict[str, Any]] = [
        {"allowed_token_ids": [yes, no]},
        {"top_p": 0.01},
        {"top_k": 1},
        {"min_p": 1.0},
        {"logit_bias": {str(yes): -100, str(no): 100}},
        {"temperature": 1e-10},
        {"temperature": 1e6},
        {"repetition_penalty": 1e6},
        {"min_tokens": 3},
    ]
    common: dict[str, Any] = {"max_tokens": 3, "seed": 1, "temperature": 1.0}
    if path == "chat":
        content: dict[str, Any] = {"messages": [user("Is it?")], "logprobs": True, "top_logprobs": 20}
        answers = together([functools.partial(both, server, CHAT, **{**content, **common, **each}) for each in narrow])
    else:
        content = {"prompt": "Is it?", "logprobs": 20, "echo": True}
        answers = together([functools.partial(both, server, **{**content, **common, **each}) for each in narrow])
    for answer in answers:
        assert all(value >= -9999.0 for value in _numbers(answer["choices"]))


def _numbers(value: Any) -> list[float]:
    if isinstance(value, dict):
        return [number for each in value.values() for number in _numbers(each)]
    if isinstance(value, list):
        return [number for each in value for number in _numbers(each)]
    return [value] if isinstance(value, float) else []
