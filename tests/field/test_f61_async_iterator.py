"""F61: the Python async API ends after the last output, keeps consumers apart, aborts when left, and never hangs."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable

import pytest
from enginecore import AsyncLLM, SamplingParams
from enginecore.config import EngineArgs
from enginecore.errors import EngineDeadError

from tests.field.support import scripted, token_prompt

ARGS = EngineArgs(device="sim", max_model_len=512, num_blocks=64, max_num_seqs=8, device_options={"step_time_s": 0.002})
PATIENCE = 60.0


async def until(condition: Callable[[], bool]) -> None:
    async def poll() -> None:
        while not condition():
            await asyncio.sleep(0.01)

    await asyncio.wait_for(poll(), PATIENCE)


async def test_life_of_async_generators() -> None:
    """One engine for all parts, since each start costs seconds."""
    async with await AsyncLLM.create(ARGS) as llm:
        await _ten_consumers_three_leave(llm)
        await _errors_reach_their_consumer(llm)
        await _death_reaches_every_consumer(llm)


async def _ten_consumers_three_leave(llm: AsyncLLM) -> None:
    leaving = {1, 4, 8}
    params = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)

    async def consume(index: int) -> list[int]:
        tokens: list[int] = []
        stream = llm.generate(token_prompt(index, 10 + index), params, request_id="the same for all")
        async for output in stream:
            tokens = output.outputs[0].token_ids
            if index in leaving and len(tokens) >= 5:
                break
        await stream.aclose()
        return tokens

    answers = await asyncio.wait_for(asyncio.gather(*map(consume, range(10))), PATIENCE)
    for index, tokens in enumerate(answers):
        expected = scripted(token_prompt(index, 10 + index), 60)
        assert tokens == (expected[: len(tokens)] if index in leaving else expected)
        assert index not in leaving or len(tokens) < 60
    assert llm.num_sequences == 0
    await until(lambda: (llm.stats.num_running, llm.stats.num_waiting, llm.stats.num_used_blocks) == (0, 0, 0))


async def _errors_reach_their_consumer(llm: AsyncLLM) -> None:
    dead_end = SamplingParams(allowed_token_ids=[338], bad_words=[llm.tokenizer.decode([338])])
    for prompt, params in (([5] * 513, None), ("", None), ([5], dead_end), ([5], SamplingParams(logprobs=21))):
        with pytest.raises(Exception, match=r"maximum context|empty|no token is left|logprobs"):
            await asyncio.wait_for(anext(llm.generate(prompt, params)), PATIENCE)
    assert llm.alive and llm.num_sequences == 0


async def _death_reaches_every_consumer(llm: AsyncLLM) -> None:
    async def consume(index: int) -> None:
        async for _ in llm.generate([5 + index], SamplingParams(max_tokens=500, ignore_eos=True)):
            pass

    tasks = [asyncio.create_task(consume(index)) for index in range(3)]
    await until(lambda: llm.stats.num_running == 3)
    os.kill(llm.client.pid, signal.SIGKILL)
    results = await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), PATIENCE)
    assert [type(result) for result in results] == [EngineDeadError] * 3
    assert llm.errored and not llm.alive
    with pytest.raises(EngineDeadError):
        await anext(llm.generate("x"))
