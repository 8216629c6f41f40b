from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import pytest
from enginecore.config import EngineArgs
from enginecore.errors import EngineDeadError, ParameterError
from enginecore.frontend.async_llm import AsyncLLM
from enginecore.request import SamplingParams

from tests.frontend.toy import ToyTokenizer
from tests.server.fake_engine import FakeEngine, parrot


@contextlib.asynccontextmanager
async def made(**settings: Any) -> AsyncIterator[tuple[AsyncLLM, FakeEngine]]:
    engine = FakeEngine(parrot, **settings)
    async with AsyncLLM(engine, ToyTokenizer(), EngineArgs()) as llm:
        yield llm, engine


PARAMS = SamplingParams(max_tokens=20)


async def test_kinds() -> None:
    async with made() as (llm, _):
        whole = [output async for output in llm.generate("abc", PARAMS)]
        assert whole[-1].finished and not any(output.finished for output in whole[:-1])
        lengths = [len(output.outputs[0].token_ids) for output in whole]
        assert lengths == sorted(lengths) and lengths[-1] == 20
        deltas = [output async for output in llm.generate("abc", PARAMS, output_kind="delta")]
        assert "".join(output.outputs[0].text for output in deltas) == whole[-1].outputs[0].text
        (final,) = [output async for output in llm.generate([267, 99], PARAMS, output_kind="final")]
        assert final.outputs[0].text.startswith("abc") and final.prompt is None


async def test_ten_consumers_three_leave_early() -> None:
    async with made(max_num_seqs=16) as (llm, engine):

        async def consume(index: int, leave: bool) -> str:
            text = ""
            async for output in llm.generate("abc"[index % 3] * 2, PARAMS, request_id="same"):
                text = output.outputs[0].text
                if leave:
                    break
            return text

        texts = await asyncio.wait_for(asyncio.gather(*(consume(i, i in (1, 4, 8)) for i in range(10))), 20)
        for index, text in enumerate(texts):
            assert set(text) == {"abc"[index % 3]} and (len(text) == 20 or index in (1, 4, 8))
        await asyncio.sleep(0.05)
        assert len(engine.aborted) == 3 and engine.num_live == 0 and llm.num_sequences == 0


async def test_cancelling_a_consumer_aborts() -> None:
    async with made() as (llm, engine):
        engine.pause = True

        async def consume() -> None:
            async for _ in llm.generate("abc", PARAMS):
                pass

        task = asyncio.create_task(consume())
        while not engine.num_live:
            await asyncio.sleep(0.001)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert engine.num_live == 0


async def test_errors_reach_the_consumer() -> None:
    async with made() as (llm, engine):
        with pytest.raises(ParameterError, match="empty"):
            await anext(llm.generate("", PARAMS))
        stream = llm.generate("abc", PARAMS)
        await anext(stream)
        engine.die()
        with pytest.raises(EngineDeadError):
            async for _ in stream:
                pass
        assert llm.errored and llm.dead.is_set()
        with pytest.raises(EngineDeadError):
            await anext(llm.generate("abc", PARAMS))


async def test_a_failure_while_handling_outputs_is_no_hang(monkeypatch: pytest.MonkeyPatch) -> None:
    async with made() as (llm, _):

        def broken(step: object) -> list[str]:
            raise RuntimeError("a bug")

        monkeypatch.setattr(llm._output, "process", broken)
        with pytest.raises(EngineDeadError, match="a bug"):
            await asyncio.wait_for(anext(llm.generate("abc", PARAMS)), 5)


async def test_shutdown_ends_consumers() -> None:
    async with made() as (llm, engine):
        engine.pause = True
        waiting = asyncio.create_task(anext(llm.generate("abc", PARAMS)))
        while not engine.num_live:
            await asyncio.sleep(0.001)
        await llm.shutdown()
        with pytest.raises(EngineDeadError, match="shut down"):
            await asyncio.wait_for(waiting, 5)
