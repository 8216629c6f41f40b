"""F21: n > 1 gives exactly n choices, each its own, counted right."""

from __future__ import annotations

from typing import Any

import pytest

from tests.field.answers import both, text, texts, user
from tests.field.support import CHAT, COMPLETIONS, refused, token_prompt
from tests.serving import ServerProcess

SAMPLED: dict[str, Any] = {"temperature": 1, "seed": 11, "max_tokens": 24, "ignore_eos": True}
BODY: dict[str, Any] = {"prompt": token_prompt(21, 20), **SAMPLED}


def test_each_choice_is_a_request_of_its_own(sim_server: ServerProcess) -> None:
    answer = both(sim_server, COMPLETIONS, 4, **BODY, n=4)
    found = texts(answer)
    assert len(set(found)) == 4, "four seeds, four texts"
    for index, expected in enumerate(found):
        assert text(sim_server.complete(**{**BODY, "seed": 11 + index})) == expected
    assert answer["usage"]["prompt_tokens"] == 20, "counted once"
    assert answer["usage"]["completion_tokens"] == 4 * 24


def test_one_choice_stops_early(sim_server: ServerProcess) -> None:
    whole = texts(both(sim_server, COMPLETIONS, 4, **BODY, n=4))
    stop = next(
        whole[1][i : i + 3]
        for i in range(3, len(whole[1]) - 3)
        if all(whole[1][i : i + 3] not in each for index, each in enumerate(whole) if index != 1)
    )
    answer = both(sim_server, COMPLETIONS, 4, **BODY, n=4, stop=stop)
    assert texts(answer) == [whole[0], whole[1].split(stop)[0], *whole[2:]]
    assert [choice["finish_reason"] for choice in answer["choices"]] == ["length", "stop", "length", "length"]
    assert [choice["stop_reason"] for choice in answer["choices"]] == [None, stop, None, None]
    assert 3 * 24 < answer["usage"]["completion_tokens"] < 4 * 24


def test_choices_of_a_chat(server: ServerProcess) -> None:
    answer = both(server, CHAT, 3, messages=[user("Name a fruit.")], n=3, temperature=1, seed=5, max_tokens=8)
    assert len(set(texts(answer))) > 1


@pytest.mark.parametrize("logprobs", [None, 0])
def test_best_of_returns_the_best_and_counts_all(sim_server: ServerProcess, logprobs: int | None) -> None:
    every = sim_server.complete(**BODY, n=4, logprobs=0)
    scores = [sum(choice["logprobs"]["token_logprobs"]) for choice in every["choices"]]
    best = sorted(range(4), key=lambda index: scores[index], reverse=True)[:2]
    answer = sim_server.complete(**BODY, n=2, best_of=4, logprobs=logprobs)
    assert texts(answer) == [texts(every)[index] for index in best]
    assert [choice["index"] for choice in answer["choices"]] == [0, 1]
    assert answer["usage"]["completion_tokens"] == 4 * 24
    assert all((choice["logprobs"] is None) == (logprobs is None) for choice in answer["choices"])


def test_best_of_cannot_be_streamed_and_must_cover_n(sim_server: ServerProcess) -> None:
    refused(sim_server.post(COMPLETIONS, {**BODY, "best_of": 2, "stream": True}), param="best_of")
    refused(sim_server.post(COMPLETIONS, {**BODY, "n": 3, "best_of": 2}), param="best_of")
    both(sim_server, COMPLETIONS, 2, **BODY, n=2, best_of=2)


def test_the_prompt_of_several_choices_is_computed_once(sim_server: ServerProcess) -> None:
    """As the server itself explains it, and accounts for it."""
    before = sim_server.http.get("/v1/memory").json()["kv_cache"]
    answer = sim_server.complete(**{**BODY, "prompt": token_prompt(2121, 200)}, n=4)
    told = sim_server.http.get(f"/v1/requests/{answer['id']}/explain").json()["sequences"]
    assert [each["prefill"]["reused_tokens"] for each in told] == [0, 199, 199, 199]
    assert {each["prefill"]["forked_from"] for each in told[1:]} == {told[0]["id"]}
    assert all(each["finish_reason"] == "length" and each["decode"]["output_tokens"] == 24 for each in told)
    after = sim_server.http.get("/v1/memory").json()["kv_cache"]
    assert after["shared_by_forks"]["tokens"] - before["shared_by_forks"]["tokens"] == 3 * 199
    assert sum(after["blocks"].values()) == after["num_blocks"]
