"""F12: a client's request id is a label. Two requests may bring the same one."""

from __future__ import annotations

import functools
from typing import Any

from enginecore import SamplingParams
from enginecore.config import EngineArgs
from enginecore.engine.client import InprocClient
from enginecore.frontend.async_llm import AsyncLLM
from enginecore.request import EngineRequest

from tests.field.support import (
    COMPLETIONS,
    baseline,
    counter,
    cut_stream,
    live,
    scripted,
    together,
    token_prompt,
    whole_stream,
)
from tests.serving import ServerProcess

HEADERS = {"x-request-id": "always-the-same"}
COUNTERS = ("prompt_tokens_total", "generation_tokens_total", "request_success_total", "prefix_cache_queries_total")


def _body(prompt: list[int], **fields: Any) -> dict[str, Any]:
    return {
        "prompt": prompt, "temperature": 0, "max_tokens": 60, "ignore_eos": True, "return_token_ids": True, **fields
    }  # fmt: skip


def _counters(server: ServerProcess) -> list[float]:
    return [counter(server, name) for name in COUNTERS]


def test_streams_with_one_id(sim_server: ServerProcess) -> None:
    """Two are read to their end, one is cut off: neither is touched by it."""
    before = _counters(sim_server)
    prompts = [token_prompt(1200 + index, 20) for index in range(3)]

    def stream(prompt: list[int]) -> list[int]:
        events = whole_stream(sim_server, COMPLETIONS, _body(prompt), headers=HEADERS)
        assert {event["id"] for event in events} == {"cmpl-always-the-same"}
        return [token for event in events for choice in event["choices"] for token in choice["token_ids"]]

    def cut(prompt: list[int]) -> list[int]:
        cut_stream(sim_server, COMPLETIONS, _body(prompt), chunks=2, headers=HEADERS)
        return []

    first, _, third = together(
        [
            functools.partial(stream, prompts[0]),
            functools.partial(cut, prompts[1]),
            functools.partial(stream, prompts[2]),
        ]
    )
    assert (first, third) == (scripted(prompts[0], 60), scripted(prompts[2], 60))
    live(sim_server)
    baseline(sim_server)
    after = _counters(sim_server)
    assert all(late >= early for early, late in zip(before, after, strict=True)), "counters never decrease"
    assert after != before


def test_batches_and_choices_with_one_id(sim_server: ServerProcess) -> None:
    prompts = [token_prompt(1210 + index, 20) for index in range(3)]

    def ask(batch: list[list[int]], n: int) -> list[list[int]]:
        answer = sim_server.post(COMPLETIONS, {**_body([]), "prompt": batch, "n": n}, headers=HEADERS)
        assert answer.status_code == 200, answer.text
        return [choice["token_ids"] for choice in answer.json()["choices"]]

    one, two, three = together(
        [
            functools.partial(ask, prompts[:2], 2),
            functools.partial(ask, prompts[1:], 1),
            functools.partial(ask, prompts[:1], 3),
        ]
    )
    right = [scripted(prompt, 60) for prompt in prompts]
    assert one == [right[0], right[0], right[1], right[1]] and two == right[1:] and three == [right[0]] * 3
    baseline(sim_server)


async def test_python_requests_with_one_id() -> None:
    """`AsyncLLM` takes the id as a label; the engine itself refuses an id in use and goes on."""
    import asyncio

    args = EngineArgs(device="sim", max_model_len=256, num_blocks=64, max_num_seqs=8)
    async with await AsyncLLM.create(args) as llm:

        async def ask(prompt: list[int]) -> list[int]:
            params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
            tokens: list[int] = []
            async for output in llm.generate(prompt, params, request_id="same"):
                assert output.request_id == "same"
                tokens = list(output.outputs[0].token_ids)
            return tokens

        prompts = [token_prompt(1220 + index, 20) for index in range(2)]
        assert await asyncio.gather(*map(ask, prompts)) == [scripted(prompt, 30) for prompt in prompts]


def test_the_engine_refuses_an_id_in_use() -> None:
    client = InprocClient(EngineArgs(device="sim", max_model_len=256, num_blocks=64, max_num_seqs=8))
    prompts = [token_prompt(1230 + index, 20) for index in range(2)]
    params = SamplingParams(temperature=0, max_tokens=10)
    for prompt in prompts:
        client.add(EngineRequest("same", prompt, params, 10))
    tokens: list[int] = []
    errors = []
    while client.has_work():
        for output in client.step().outputs:
            tokens += output.token_ids
            errors += [output.error] if output.error else []
    client.shutdown()
    assert tokens == scripted(prompts[0], 10)
    assert len(errors) == 1 and "already in use" in errors[0]


