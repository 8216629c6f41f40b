"""F11: prompt log-probabilities and echo are whole and right with the prefix cache on."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from enginecore import LLM, SamplingParams
from enginecore_sim import candidates

from tests.field.support import VOCAB, baseline, live, scripted, token_prompt
from tests.serving import ServerProcess

TOLERANCE = 1e-3


def _chosen(entries: list[dict[str, Any] | None], prompt: list[int]) -> list[float]:
    """The log-probability of each prompt token after the first."""
    assert len(entries) == len(prompt) and entries[0] is None
    values = []
    for entry, token in zip(entries[1:], prompt[1:], strict=True):
        assert entry is not None
        values.append(entry[str(token)]["logprob"])
    return values


def _same(first: list[dict[str, Any] | None], second: list[dict[str, Any] | None]) -> None:
    """Equal to float32's last digits: a batch of another size may round differently."""
    assert len(first) == len(second)
    for ours, theirs in zip(first, second, strict=True):
        if ours is None or theirs is None:
            assert ours is theirs
            continue
        assert ours.keys() == theirs.keys()
        for token, entry in ours.items():
            assert entry["logprob"] == pytest.approx(theirs[token]["logprob"], abs=TOLERANCE)


@pytest.mark.model
def test_twice_and_after_a_shared_prefix(server: ServerProcess, greedy_reference: list[dict[str, Any]]) -> None:
    """The prompt is one of the oracle's with its answer, so that the oracle's values are there for that part."""
    case = next(case for case in greedy_reference if 40 <= len(case["prompt_token_ids"]) <= 160)
    prompt: list[int] = [*case["prompt_token_ids"], *case["output_token_ids"]]
    start = len(case["prompt_token_ids"])

    def ask(ids: list[int], **fields: Any) -> list[dict[str, Any] | None]:
        answer = server.complete(prompt=ids, prompt_logprobs=5, max_tokens=1, **fields)
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 0, "every position is computed"
        entries: list[dict[str, Any] | None] = answer["choices"][0]["prompt_logprobs"]
        return entries

    uncached = ask(prompt, cache_salt="F11")
    first, second = ask(prompt), ask(prompt)
    _same(first, uncached)
    _same(second, uncached)
    plain = server.complete(prompt=prompt)
    cached = plain["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert cached >= (len(prompt) - 1) // 16 * 16, "it fills the cache"
    _same(ask([*prompt[:64], 260, 261, 262])[:64], uncached[:64])
    assert len(_chosen(uncached, prompt)) == len(prompt) - 1
    assert len(case["top5"]) >= 8
    for entry, best in zip(uncached[start:], case["top5"], strict=False):
        assert entry is not None
        for token, value in best:
            assert entry[str(token)]["logprob"] == pytest.approx(value, abs=TOLERANCE)
    live(server)
    baseline(server)


@pytest.mark.model
def test_echo_without_new_tokens(server: ServerProcess) -> None:
    text = "The lighthouse stood on the cliff, and the sea was calm."
    for _ in range(2):
        answer = server.complete(prompt=text, echo=True, max_tokens=0, logprobs=2)
        (choice,) = answer["choices"]
        columns = choice["logprobs"]
        assert choice["text"] == text and choice["finish_reason"] == "length"
        assert answer["usage"]["completion_tokens"] == 0
        assert {len(column) for column in columns.values()} == {answer["usage"]["prompt_tokens"]}
        assert columns["token_logprobs"][0] is None and all(value <= 0 for value in columns["token_logprobs"][1:])
        assert "".join(columns["tokens"]) == text
    scored = server.complete(prompt=text, max_tokens=0, prompt_logprobs=0)
    values = [next(iter(entry.values()))["logprob"] for entry in scored["choices"][0]["prompt_logprobs"][1:]]
    assert values == pytest.approx(columns["token_logprobs"][1:], abs=TOLERANCE)
    baseline(server)


def _oracle(prompt: list[int], position: int) -> dict[int, float]:
    """Log-probabilities of the simulated device for the token at `position`: its candidates' logits are 16, 14, ..."""
    best = candidates(prompt[:position], VOCAB)
    logits = np.zeros(VOCAB)
    logits[best] = 16.0 - 2 * np.arange(len(best))
    logits -= np.log(np.exp(logits).sum())
    return {token: float(logits[token]) for token in [*best[:3], prompt[position]]}


@pytest.mark.parametrize(("chunk", "budget"), [(16, 512), (64, 64), (0, 24)])
def test_chunks(chunk: int, budget: int) -> None:
    """Whatever pieces prompts are computed in, alone and side by side, cached or not."""
    prompts = [token_prompt(1100 + index, 70 + index) for index in range(3)]
    prompts.append(prompts[0][:32] + token_prompt(1199, 20))
    with LLM(
        device="sim", max_model_len=256, num_blocks=64, max_num_seqs=8, max_num_batched_tokens=budget,
        long_prefill_token_threshold=chunk,
    ) as llm:  # fmt: skip
        params = SamplingParams(temperature=0, max_tokens=3, prompt_logprobs=3, ignore_eos=True)
        plain = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
        for turn in range(2):
            outputs = llm.generate(prompts, [params, params, plain if turn else params, params], use_tqdm=False)
            for prompt, output in zip(prompts, outputs, strict=True):
                assert output.outputs[0].token_ids == scripted(prompt, 3)
                if output is outputs[2] and turn:
                    assert output.num_cached_tokens > 0
                    continue
                assert output.num_cached_tokens == 0
                assert output.prompt_logprobs is not None and len(output.prompt_logprobs) == len(prompt)
                assert output.prompt_logprobs[0] is None
                for position, entry in enumerate(output.prompt_logprobs[1:], 1):
                    assert entry is not None
                    got = {token: value.logprob for token, value in entry.items()}
                    assert got == pytest.approx(_oracle(prompt, position), abs=1e-4)
        assert llm._client.call("stats").num_used_blocks == 0
