"""Streams that are read slowly or not to the end, a full queue, a dying engine, a server that closes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from enginecore.server.args import ServerArgs
from enginecore.server.errors import ShuttingDownError

from tests.server.asgi import Exchange
from tests.server.checkers import (
    check_chat_stream,
    check_completion_stream,
    check_error,
    metric,
    parse_events,
    same_answer,
)
from tests.server.fake_engine import Running, parrot, running

PATH = "/v1/completions"


async def until(condition: Callable[[], bool]) -> None:
    for _ in range(2000):
        if condition():
            return
        await asyncio.sleep(0.002)
    raise AssertionError("it did not happen")


def start(server: Running, *, stream: bool = True, prompt: str = "abc", **body: Any) -> Exchange:
    return Exchange(server.app, PATH, {"prompt": prompt, "max_tokens": 50, "stream": stream, **body}).start()


async def test_hanging_up_aborts_and_gauges_follow_without_new_traffic() -> None:
    async with running(parrot, max_num_seqs=2) as server:
        exchanges = [start(server, n=2), start(server, stream=False), start(server), start(server, stream=False)]
        await exchanges[0].wait_for(3)
        for exchange in exchanges:
            exchange.hang_up()
        for exchange in exchanges:
            assert exchange.task is not None
            await asyncio.wait_for(exchange.task, 5)
        await until(lambda: server.llm.stats.num_running == 0)
        text = await server.metrics()
        assert metric(text, "num_requests_running") == metric(text, "num_requests_waiting") == 0
        assert metric(text, "kv_cache_usage_perc") == 0
        assert metric(text, "request_success_total", finished_reason="abort") == 4
        assert server.engine.num_live == 0 and server.llm.num_sequences == 0 and server.app.state.in_flight == 0
        assert len(set(server.engine.aborted)) == 5


async def test_hanging_up_while_the_prompt_is_tokenised() -> None:
    async with running(parrot) as server:
        held = asyncio.Event()

        async def slow(*args: object, **kwargs: object) -> object:
            await held.wait()
            raise AssertionError("not reached")

        server.llm.off_loop = slow  # type: ignore[method-assign, assignment]
        exchange = start(server)
        await until(lambda: server.app.state._reserved == 1)
        exchange.hang_up()
        assert exchange.task is not None
        await asyncio.wait_for(exchange.task, 5)
        assert server.app.state._reserved == 0 and not server.engine.requests


async def test_a_slow_reader_gets_everything() -> None:
    body: dict[str, Any] = {
        "logprobs": 2,
        "n": 2,
        "max_tokens": 30,
        "echo": True,
        "stream_options": {"include_usage": True},
    }
    async with running(parrot) as server:
        exchange = start(server, **body)
        await exchange.wait_for(2)
        exchange.gate.clear()
        await until(lambda: server.engine.num_live == 0)
        exchange.gate.set()
        assert exchange.task is not None
        await exchange.task
        stream = check_completion_stream(exchange.body.decode(), 2, usage=True, echo=True)
        assert len(exchange.sent) < 10, "held back deltas are merged"
        del body["stream_options"]
        plain = await server.post(PATH, prompt="abc", **body)
        same_answer(stream, plain.json(), cached=True)


async def test_full_queue_counts_sequences() -> None:
    async with running(parrot, max_num_seqs=2, args=ServerArgs(max_waiting=4)) as server:
        server.engine.pause = True
        for prompt, n in ((["ab", "cd"], 1), ("ab", 3)):
            Exchange(server.app, PATH, {"prompt": prompt, "n": n, "max_tokens": 3}).start()
        await until(lambda: server.engine.num_live == 5)
        last = start(server)
        await until(lambda: server.engine.num_live == 6)
        for body in ({"prompt": "ab"}, {"prompt": ["ab", "cd"]}, {"prompt": "ab", "n": 4, "stream": True}):
            response = await server.post(PATH, **body)
            error = check_error(response.status_code, response.content, 429)
            assert error["code"] == "queue_full" and int(response.headers["retry-after"]) >= 1
        last.hang_up()
        await until(lambda: server.llm.num_sequences == 5)
        again = start(server, max_tokens=3)
        await until(lambda: server.engine.num_live == 6)
        server.engine.pause = False
        assert again.task is not None
        await asyncio.wait_for(again.task, 10)
        check_completion_stream(again.body.decode())
        await until(lambda: server.llm.num_sequences == 0)
        assert (await server.post(PATH, prompt=["a"] * 6)).status_code == 200


async def test_twenty_at_once_on_a_queue_of_six() -> None:
    async with running(parrot, max_num_seqs=2, args=ServerArgs(max_waiting=4)) as server:
        server.engine.pause = True
        posts = [asyncio.create_task(server.post(PATH, prompt="ab", max_tokens=2)) for _ in range(20)]
        await until(lambda: sum(post.done() for post in posts) == 14)
        server.engine.pause = False
        codes = sorted([(await post).status_code for post in posts])
        assert codes == [200] * 6 + [429] * 14


async def test_the_engine_dies() -> None:
    async with running(parrot, max_model_len=300) as server:
        stream, waiting = start(server, max_tokens=199), start(server, max_tokens=199, stream=False)
        chat = Exchange(
            server.app, "/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}], "stream": True}
        ).start()
        await stream.wait_for(3)
        await chat.wait_for(3)
        server.engine.pause = True
        server.engine.die()
        for exchange in (stream, waiting, chat):
            assert exchange.task is not None
            await asyncio.wait_for(exchange.task, 3)
        check_error(waiting.status, waiting.body, 500)
        for exchange in (stream, chat):
            last = parse_events(exchange.body.decode())[-1]
            assert last["error"]["code"] == "engine_dead"
        for path in ("/health", "/ping"):
            response = await server.http.get(path)
            check_error(response.status_code, response.content, 503)
        response = await server.post(PATH, prompt="a")
        check_error(response.status_code, response.content, 503)
        assert server.llm.dead.is_set() and (await server.http.get("/metrics")).status_code == 200


async def test_draining() -> None:
    async with running(parrot) as server:
        stream, cut = start(server, max_tokens=20), start(server)
        await stream.wait_for(3)
        server.app.state.draining = True
        check_error(*(await _get(server, "/health")), 503)
        response = await server.post(PATH, prompt="a")
        error = check_error(response.status_code, response.content, 503)
        assert error["code"] == "shutting_down" and response.headers["retry-after"]
        assert (await server.http.get("/metrics")).status_code == 200
        assert stream.task is not None and cut.task is not None
        await asyncio.wait_for(stream.task, 10)
        check_completion_stream(stream.body.decode())
        server.engine.pause = True
        server.llm.fail_all(ShuttingDownError())
        await asyncio.wait_for(cut.task, 5)
        assert parse_events(cut.body.decode())[-1]["error"]["code"] == "shutting_down"
        assert server.engine.num_live == 0 and server.app.state.in_flight == 0


async def _get(server: Running, path: str) -> tuple[int, bytes]:
    response = await server.http.get(path)
    return response.status_code, response.content


async def test_one_write_a_step() -> None:
    """All choices of a stream that move in a step go out together."""
    async with running(parrot) as server:
        exchange = start(server, n=4, max_tokens=10)
        assert exchange.task is not None
        await exchange.task
        bodies = [message["body"] for message in exchange.sent[1:]]
        assert len(bodies) == 11 and all(body.count(b"data: ") == 4 for body in bodies[:-1])


async def test_metrics_equal_usage() -> None:
    async with running(parrot) as server:
        prompts = completions = 0
        for body in (
            {"prompt": "ab"},
            {"prompt": ["abc", "d"], "n": 2},
            {"prompt": "xy", "best_of": 3, "max_tokens": 4},
        ):
            usage = (await server.post(PATH, **body)).json()["usage"]
            prompts, completions = prompts + usage["prompt_tokens"], completions + usage["completion_tokens"]
        text = await server.metrics()
        assert metric(text, "prompt_tokens_total") == metric(text, "request_prompt_tokens_sum") == prompts
        assert metric(text, "generation_tokens_total") == metric(text, "request_generation_tokens_sum") == completions
        for name in ("e2e_request_latency_seconds", "time_to_first_token_seconds", "request_generation_tokens"):
            assert metric(text, f"{name}_count") == 4
        assert metric(text, "inter_token_latency_seconds_count") > 0
        assert metric(text, "request_success_total", finished_reason="length", model_name="toy") == 4
        for name in ("prefix_cache_queries_total", "prefix_cache_hits_total", "num_preemptions_total"):
            assert metric(text, name) == 0


async def test_models_version_and_tokens() -> None:
    async with running(parrot) as server:
        (model,) = (await server.http.get("/v1/models")).json()["data"]
        assert model["id"] == "toy" and model["max_model_len"] == 64 and model["object"] == "model"
        assert (await server.http.get("/v1/models/toy")).json() == model
        check_error(*(await _get(server, "/v1/models/a/b")), 404)
        assert (await server.http.get("/version")).json()["version"]
        answer = (await server.post("/tokenize", prompt="the ab", return_token_strs=True)).json()
        assert answer == {"count": 3, "max_model_len": 64, "tokens": [261, 32, 267], "token_strs": ["the", " ", "ab"]}
        chat = (await server.post("/tokenize", messages=[{"role": "user", "content": "hi"}])).json()["tokens"]
        text = (await server.post("/detokenize", tokens=chat)).json()["prompt"]
        assert text == "<|start|>user\nhi<|end|>\n<|start|>assistant\n"
        bad: tuple[tuple[str, dict[str, object], str], ...] = (
            ("/tokenize", {}, "prompt"),
            ("/tokenize", {"prompt": "a", "messages": []}, "prompt"),
            ("/tokenize", {"prompt": 5}, "prompt"),
            ("/tokenize", {"prompt": "a", "chat_template": "x"}, "chat_template"),
            ("/tokenize", {"messages": [], "chat_template_kwargs": {"messages": 1}}, "messages"),
            ("/detokenize", {}, "tokens"),
            ("/detokenize", {"tokens": [274]}, "tokens"),
            ("/detokenize", {"tokens": [-1]}, "tokens"),
            ("/detokenize", {"tokens": ["a"]}, "tokens[0]"),
        )
        for path, body, param in bad:
            response = await server.post(path, **body)
            check_error(response.status_code, response.content, 400, param)


async def test_many_mixed_calls_at_once() -> None:
    async with running(parrot) as server:
        chat = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 3}
        calls = []
        for i in range(60):
            calls.append(server.post("/tokenize", prompt="ab" * i + "x"))
            calls.append(
                server.post("/v1/chat/completions", **chat, truncate_prompt_tokens=i % 7 + 1, stream=i % 2 == 0)
            )
            calls.append(server.post(PATH, prompt="the abc", bad_words=["Paris"], max_tokens=3))
        responses = await asyncio.gather(*calls)
        assert all(response.status_code == 200 for response in responses)
        assert [response.json()["count"] for response in responses[::3]] == [i + 1 for i in range(60)]
        for i, response in enumerate(responses[1::3]):
            if i % 2 == 0:
                check_chat_stream(response.text)
            else:
                assert response.json()["usage"]["prompt_tokens"] == i % 7 + 1
