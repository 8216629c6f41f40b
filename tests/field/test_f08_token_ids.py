"""F08: token ids that the model does not have are a 400, whatever the field, and touch nobody else."""

from __future__ import annotations

import functools
import itertools
import json
from typing import Any

import pytest

from tests.field.support import (
    CHAT,
    COMPLETIONS,
    DETOKENIZE,
    VOCAB,
    InFlight,
    Solo,
    post_raw,
    refused,
    scripted,
    token_prompt,
    unharmed,
)
from tests.serving import ServerProcess

IDS = (-1, VOCAB, VOCAB + 1, 2**31, 2**63)
USER = [{"role": "user", "content": "hi"}]


def _fields(token: int, as_text: bool) -> list[tuple[str, Any]]:
    """Every field that takes token ids, with this one in it."""
    shown: Any = str(token) if as_text else token
    fields: list[tuple[str, Any]] = [("logit_bias", {str(token): 1})]
    fields += [(name, [5, shown]) for name in ("stop_token_ids", "allowed_token_ids")]
    return fields


def _bad_requests() -> list[tuple[str, dict[str, Any], str]]:
    """(route, body, field that is wrong)"""
    requests: list[tuple[str, dict[str, Any], str]] = []
    for token, as_text in itertools.product(IDS, (False, True)):
        for name, value in _fields(token, as_text):
            requests.append((COMPLETIONS, {"prompt": "a", name: value}, name))
            requests.append((CHAT, {"messages": USER, name: value}, name))
        shown: Any = str(token) if as_text else token
        requests.append((COMPLETIONS, {"prompt": [5, shown, 6]}, "prompt"))
        requests.append((COMPLETIONS, {"prompt": [[5, 6], [5, shown]]}, "prompt[1]"))
        requests.append((DETOKENIZE, {"tokens": [5, shown]}, "tokens"))
    return requests


def test_ids_out_of_range(sim_server: ServerProcess) -> None:
    """Three requests run meanwhile; their tokens are what they would be alone."""
    prompts = [token_prompt(800 + index, 30) for index in range(3)]

    def neighbour(prompt: list[int]) -> list[int]:
        answer = sim_server.complete(prompt=prompt, max_tokens=400, ignore_eos=True, return_token_ids=True)
        tokens: list[int] = answer["choices"][0]["token_ids"]
        return tokens

    with unharmed(sim_server):
        with InFlight([functools.partial(neighbour, prompt) for prompt in prompts]) as flight:
            for path, body, param in _bad_requests():
                error = refused(sim_server.post(path, body))
                assert error["param"].startswith(param), (body, error)
        assert flight.results == [scripted(prompt, 400) for prompt in prompts]


def test_edges_that_are_in_range(sim_server: ServerProcess) -> None:
    for token in (0, VOCAB - 1):
        for name, value in (*_fields(token, False), ("prompt", [token])):
            body = {"prompt": "a", "max_tokens": 1, name: value}
            assert sim_server.post(COMPLETIONS, body).status_code == 200, body


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (CHAT, {"messages": USER, "logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        (CHAT, {"messages": USER, "logprobs": True, "top_logprobs": -1}, "top_logprobs"),
        (CHAT, {"messages": USER, "top_logprobs": 5}, "top_logprobs"),
        (CHAT, {"messages": USER, "prompt_logprobs": 21}, "prompt_logprobs"),
        (COMPLETIONS, {"prompt": "a", "logprobs": 21}, "logprobs"),
        (COMPLETIONS, {"prompt": "a", "logprobs": -1}, "logprobs"),
        (COMPLETIONS, {"prompt": "a", "prompt_logprobs": 21}, "prompt_logprobs"),
        (COMPLETIONS, {"prompt": "a", "allowed_token_ids": []}, "allowed_token_ids"),
    ],
)
def test_counts_above_the_cap(sim_server: ServerProcess, path: str, body: dict[str, Any], param: str) -> None:
    with unharmed(sim_server):
        refused(sim_server.post(path, body), 400, param)


@pytest.mark.model
def test_neighbours_on_the_real_model(server: ServerProcess, solo: Solo) -> None:
    prompts = [f"The capital of {country} is" for country in ("France", "Italy", "Norway")]
    alone = [solo.text(prompt, 20) for prompt in prompts]
    calls = [functools.partial(server.complete, prompt=prompt, max_tokens=20) for prompt in prompts]
    with unharmed(server):
        with InFlight(calls) as flight:
            for path, body, _ in _bad_requests()[:33]:
                refused(post_raw(server, path, json.dumps(body).encode()))
        assert [answer["choices"][0]["text"] for answer in flight.results] == alone
