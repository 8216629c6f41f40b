"""F18: a pool for two sequences gives the answers of a roomy one."""

from __future__ import annotations

import functools
from typing import Any

import pytest
from enginecore import LLM, SamplingParams

from tests.field.support import (
    COMPLETIONS,
    baseline,
    counter,
    scripted,
    together,
    token_prompt,
    whole_stream,
)
from tests.server.checkers import strict_json
from tests.serving import ServerProcess

TOKENS = 100


def _requests() -> list[dict[str, Any]]:
    """Greedy, seeded, penalised, several choices, with and without log-probabilities, a stop token in mid-answer."""
    kinds: list[dict[str, Any]] = [
        {"temperature": 0, "logprobs": 3},
        {"temperature": 1.0, "seed": 11, "logprobs": 0},
        {"temperature": 2.0, "seed": 12, "top_p": 0.9, "n": 3},
        {"temperature": 0, "frequency_penalty": 1.5, "logit_bias": {"9": 60, "10": 59, "11": 58}},
        {"temperature": 3.0, "seed": 13, "top_k": 4, "presence_penalty": 1.0},
        {"temperature": 0, "n": 2, "best_of": 3},
        {"temperature": 0, "prompt_logprobs": 2},
        {"temperature": 0, "stop_token_ids": [scripted(token_prompt(7, 27), 60)[-1]]},
    ]
    return [
        {"prompt": token_prompt(index, 20 + index), "max_tokens": TOKENS, "ignore_eos": True, **kind}
        for index, kind in enumerate(kinds)
    ]


def _comparable(answer: dict[str, Any]) -> dict[str, Any]:
    usage = {name: count for name, count in answer["usage"].items() if name != "prompt_tokens_details"}
    return {"choices": answer["choices"], "usage": usage}


def _ask(server: ServerProcess, body: dict[str, Any]) -> dict[str, Any]:
    answer = server.post(COMPLETIONS, {**body, "return_token_ids": True})
    assert answer.status_code == 200, answer.text
    whole: dict[str, Any] = strict_json(answer.content)
    return _comparable(whole)


@pytest.fixture(scope="module")
def roomy(sim_server: ServerProcess) -> list[dict[str, Any]]:
    return [_ask(sim_server, body) for body in _requests()]


@pytest.mark.parametrize("kind", ["tiny_server", "tiny_priority_server", "tiny_swap_server"])
def test_answers_are_those_of_a_roomy_pool(
    kind: str, roomy: list[dict[str, Any]], request: pytest.FixtureRequest
) -> None:
    """Text, token ids, log-probabilities, finish reasons and usage: everything but what was cached."""
    tiny: ServerProcess = request.getfixturevalue(kind)
    bodies = _requests()
    if kind == "tiny_priority_server":
        bodies = [{**body, "priority": index * 5 % 3} for index, body in enumerate(bodies)]
    before = counter(tiny, "num_preemptions_total")
    assert together([functools.partial(_ask, tiny, body) for body in bodies]) == roomy
    assert counter(tiny, "num_preemptions_total") > before
    assert (counter(tiny, "num_swaps_total") > 0) == (kind == "tiny_swap_server")
    assert (counter(tiny, "host_cache_hits_total") > 0) == (kind == "tiny_swap_server")
    assert roomy[0]["choices"][0]["token_ids"] == scripted(bodies[0]["prompt"], TOKENS)
    assert roomy[7]["choices"][0]["finish_reason"] == "stop" and roomy[7]["usage"]["completion_tokens"] == 60
    baseline(tiny)


def test_streams_have_every_token_once(tiny_server: ServerProcess) -> None:
    prompts = [token_prompt(100 + index, 30) for index in range(8)]
    before = counter(tiny_server, "num_preemptions_total")

    def stream(prompt: list[int]) -> list[int]:
        events = whole_stream(
            tiny_server,
            COMPLETIONS,
            {"prompt": prompt, "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True, "return_token_ids": True},
        )
        return [token for event in events for choice in event["choices"] for token in choice["token_ids"]]

    streamed = together([functools.partial(stream, prompt) for prompt in prompts])
    assert streamed == [scripted(prompt, TOKENS) for prompt in prompts]
    assert counter(tiny_server, "num_preemptions_total") > before
    baseline(tiny_server)


@pytest.mark.model
def test_the_real_model(server: ServerProcess) -> None:
    """Offline with a pool for two sequences against the roomy server: greedy, and seeded with a penalty."""
    prompts = [f"Here is story number {index}. Once upon a time" for index in range(8)]
    greedy: dict[str, Any] = {"temperature": 0}
    kinds = [greedy, {"temperature": 0.8, "seed": 5, "repetition_penalty": 1.2}] * 4
    calls = [
        functools.partial(server.complete, prompt=prompt, max_tokens=36, logprobs=0, cache_salt="F18", **kind)
        for prompt, kind in zip(prompts, kinds, strict=True)
    ]
    wanted = [answer["choices"][0] for answer in together(calls)]
    with LLM(device="cpu", dtype="float32", max_model_len=64, num_blocks=8, max_num_seqs=8) as llm:
        params = [SamplingParams(max_tokens=36, logprobs=0, **kind) for kind in kinds]
        outputs = llm.generate(prompts, params, use_tqdm=False)
        stats = llm._client.call("stats")
    assert stats.num_preemptions > 0 and stats.num_used_blocks == 0
    for output, choice in zip(outputs, wanted, strict=True):
        (ours,) = output.outputs
        assert (ours.text, ours.finish_reason) == (choice["text"], choice["finish_reason"])
        values = choice["logprobs"]["token_logprobs"]
        assert ours.logprobs is not None
        assert [entry[token].logprob for entry, token in zip(ours.logprobs, ours.token_ids, strict=True)] == (
            pytest.approx(values, abs=1e-3)
        )
        assert ours.cumulative_logprob == pytest.approx(sum(values), abs=1e-2), "each token counted once"
