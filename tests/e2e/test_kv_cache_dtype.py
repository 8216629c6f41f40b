"""The real model over caches of bytes: close to the model's own tokens, and the same answer however it is reached.

What a byte loses is lost when a token is written. So a prompt alone, beside others, after a hit inside a block, and
back from host memory must give the same tokens and log-probabilities, bit for bit.
"""

from __future__ import annotations

from typing import Any

import pytest
from enginecore import LLM, SamplingParams

pytestmark = pytest.mark.model

#: Of the reference's first 16 tokens of each prompt, the share that comes before the first other one, at least.
AGREEMENT = {"int8": 0.85, "fp8_e4m3": 0.8}
BLOCK_BYTES = {"int8": 30 * 2 * 3 * 16 * 68, "fp8_e4m3": 30 * 2 * 3 * 16 * 64}


def answers(llm: LLM, prompts: list[list[int]], count: int = 16, *, read: bool = False) -> tuple[list[Any], int]:
    """([tokens and their log-probabilities], prompt tokens that were reused) of greedy answers."""
    params = SamplingParams(temperature=0, max_tokens=count, logprobs=0, skip_reading_prefix_cache=not read)
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
    told = []
    for (first,) in (output.outputs for output in outputs):
        chosen = zip(first.logprobs, first.token_ids, strict=True)
        told.append((first.token_ids, [found[token].logprob for found, token in chosen]))
    return told, sum(output.num_cached_tokens for output in outputs)


@pytest.mark.parametrize("kv_dtype", list(AGREEMENT))
def test_close_to_the_model_and_the_same_however_reached(kv_dtype: str, greedy_reference: list[dict[str, Any]]) -> None:
    cases = [case for case in greedy_reference if len(case["output_token_ids"]) >= 16][:8]
    prompts = [case["prompt_token_ids"] for case in cases]
    settings: dict[str, Any] = {"num_blocks": 64, "max_model_len": 192, "kv_host_memory": 64 << 20}
    with LLM("smollm2-135m", device="cpu", dtype="float32", kv_cache_dtype=kv_dtype, **settings) as llm:
        ledger = llm._client.ready.ledger
        assert ledger["kv_cache"] == 64 * BLOCK_BYTES[kv_dtype]
        together, _ = answers(llm, prompts)
        agreed = 0
        for (tokens, _), case in zip(together, cases, strict=True):
            same = [ours == theirs for ours, theirs in zip(tokens, case["output_token_ids"][:16], strict=True)]
            agreed += same.index(False) if False in same else 16
        assert agreed >= AGREEMENT[kv_dtype] * 16 * len(cases), agreed / 16 / len(cases)
        assert answers(llm, prompts[3:4])[0] == together[3:4], "alone as beside others"

        long = prompts[0] * 3
        parted = [*long[:23], 1234, *prompts[1][:12]]
        answers(llm, [long[:60]])
        before = llm._client.call("stats").copied_tokens
        found, cached = answers(llm, [parted], read=True)
        assert cached == 23 and llm._client.call("stats").copied_tokens - before == 7, "a block was copied"
        assert found == answers(llm, [parted])[0]

        prompt = (prompts[2] * 3)[:100]
        computed, _ = answers(llm, [prompt])
        answers(llm, [[7 + seed, *prompts[seed] * 4][:150] for seed in range(8)])  # fills the device's cache
        found, cached = answers(llm, [prompt], read=True)
        assert cached >= 96 and llm._client.call("memory")["host_loaded"] > 0, "blocks came back from the host"
        assert found == computed
