"""F34: streamed log-probabilities, put together, are those of the plain answer: exactly one entry a token."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.field.answers import both, text, user
from tests.field.support import CHAT, COMPLETIONS, token_prompt
from tests.server.asgi import Exchange
from tests.server.checkers import check_chat_stream, check_completion, check_completion_stream, same_answer
from tests.server.fake_engine import parrot, running
from tests.serving import ServerProcess

BODY: dict[str, Any] = {"temperature": 1, "seed": 9, "max_tokens": 24, "ignore_eos": True}


def test_held_back_characters_and_stop_strings(sim_server: ServerProcess) -> None:
    prompt = {"prompt": token_prompt(34, 10), **BODY, "logprobs": 3, "return_token_ids": True}
    whole = both(sim_server, **prompt)
    assert len(whole["choices"][0]["logprobs"]["tokens"]) == 24
    for size in (1, 4, 30):
        stop = text(whole)[-size:]
        answer = both(sim_server, **prompt, stop=[stop, text(whole)[-40:-2]])
        (choice,) = answer["choices"]
        assert choice["finish_reason"] == "stop"
        assert len(choice["logprobs"]["tokens"]) == len(choice["token_ids"]) == answer["usage"]["completion_tokens"]
    both(sim_server, COMPLETIONS, 3, **prompt, n=3)


def test_chat(sim_server: ServerProcess) -> None:
    body = {"messages": [user("hello")], **BODY, "logprobs": True, "top_logprobs": 2}
    answer = both(sim_server, CHAT, **body)
    assert len(answer["choices"][0]["logprobs"]["content"]) == 24
    both(sim_server, CHAT, **body, stop=text(answer)[-3:])


@pytest.mark.parametrize("tokens_per_step", [1, 3])
async def test_a_slow_reader_gets_merged_deltas(tokens_per_step: int) -> None:
    async with running(parrot, tokens_per_step=tokens_per_step) as server:
        body = {"prompt": "the 😀 x", "max_tokens": 30, "logprobs": 3}
        plain = check_completion((await server.post(COMPLETIONS, **body)).json())
        exchange = Exchange(server.app, COMPLETIONS, {**body, "stream": True})
        exchange.start()
        await exchange.wait_for(3)
        exchange.gate.clear()  # the client reads no more until the engine is done
        while server.engine.num_live:
            await asyncio.sleep(0.001)
        exchange.gate.set()
        assert exchange.task is not None
        await exchange.task
        assert len(exchange.sent) < 15, "what came meanwhile is one chunk"
        same_answer(check_completion_stream(exchange.body.decode()), plain)
        chat = Exchange(server.app, CHAT, {"messages": [user("x")], "logprobs": True, "max_tokens": 9, "stream": True})
        await chat.run()
        logprobs = check_chat_stream(chat.body.decode())["choices"][0]["logprobs"]
        assert len(logprobs["content"]) == 9
