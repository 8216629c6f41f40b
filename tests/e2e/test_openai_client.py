"""The official `openai` client drives the server: what it parses into its types is the contract that users rely on."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from typing import Any

import openai
import pytest
from openai import AsyncOpenAI, OpenAI

from tests.e2e.conftest import KEY
from tests.serving import MODEL_NAME, ServerProcess

HELLO: list[Any] = [{"role": "user", "content": "Hello"}]
GREEDY: dict[str, Any] = {"model": MODEL_NAME, "temperature": 0, "extra_body": {"ignore_eos": True}}
LONG: dict[str, Any] = {**GREEDY, "max_tokens": 900}


@pytest.fixture(scope="module")
def client(sim_server: ServerProcess) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{sim_server.url}/v1", api_key=KEY, max_retries=0, timeout=60) as client:
        yield client


@pytest.fixture
async def async_client(sim_server: ServerProcess) -> AsyncIterator[AsyncOpenAI]:
    async with AsyncOpenAI(base_url=f"{sim_server.url}/v1", api_key=KEY, max_retries=0, timeout=60) as client:
        yield client


def wait_idle(server: ServerProcess) -> None:
    """Until nothing runs: what was given up has left the engine."""
    deadline = time.monotonic() + 30
    while server.metrics()["enginecore:num_requests_running"]:
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_models(client: OpenAI) -> None:
    (model,) = client.models.list().data
    assert (model.id, model.object) == (MODEL_NAME, "model") and model.created > 0
    assert client.models.retrieve(MODEL_NAME).id == MODEL_NAME
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other")


def test_chat_plain_and_streamed(client: OpenAI) -> None:
    options: dict[str, Any] = {**GREEDY, "messages": HELLO, "max_tokens": 12, "logprobs": True, "top_logprobs": 3}
    plain = client.chat.completions.create(**options)
    assert plain.object == "chat.completion" and plain.model == MODEL_NAME and plain.usage is not None
    assert plain.choices[0].message.role == "assistant" and plain.choices[0].finish_reason == "length"
    assert plain.usage.completion_tokens == 12 and plain.usage.prompt_tokens_details is not None
    text, entries, finishes, usages = "", list[Any](), list[str](), list[Any]()
    for chunk in client.chat.completions.create(**options, stream=True, stream_options={"include_usage": True}):
        usages += [chunk.usage] if chunk.usage else []
        for choice in chunk.choices:
            text += choice.delta.content or ""
            entries += (choice.logprobs.content or []) if choice.logprobs else []
            finishes += [choice.finish_reason] if choice.finish_reason else []
    assert text == plain.choices[0].message.content and finishes == ["length"]
    (usage,) = usages
    assert (usage.prompt_tokens, usage.completion_tokens) == (plain.usage.prompt_tokens, 12)
    assert plain.choices[0].logprobs is not None and entries == plain.choices[0].logprobs.content
    assert all(len(entry.top_logprobs) == 3 and entry.logprob <= 0 for entry in entries)


def test_the_clients_own_stream_helper(client: OpenAI) -> None:
    """It puts a stream together by itself, and raises where events contradict one another."""
    ending = {"logit_bias": {"2": 100}, "extra_body": {"min_tokens": 6}}  # token 2 ends the text
    options: dict[str, Any] = {**GREEDY, "messages": HELLO, "max_tokens": 20, "n": 2, **ending}
    with client.chat.completions.stream(**options) as stream:
        kinds = {event.type for event in stream}
        whole = stream.get_final_completion()
    assert kinds >= {"chunk", "content.delta", "content.done"}
    plain = client.chat.completions.create(**options)
    assert [choice.finish_reason for choice in whole.choices] == ["stop"] * 2
    assert [c.message.content for c in whole.choices] == [c.message.content for c in plain.choices]


def test_completions(client: OpenAI) -> None:
    options: dict[str, Any] = {**GREEDY, "prompt": ["one", "two"], "max_tokens": 5, "n": 2, "logprobs": 2}
    plain = client.completions.create(**options)
    assert [choice.index for choice in plain.choices] == [0, 1, 2, 3]
    assert plain.usage is not None and plain.usage.completion_tokens == 20
    texts = [""] * 4
    for chunk in client.completions.create(**options, stream=True):
        for choice in chunk.choices:
            texts[choice.index] += choice.text
    assert texts == [choice.text for choice in plain.choices]
    first = plain.choices[0].logprobs
    assert first is not None and first.tokens is not None and "".join(first.tokens) == texts[0]
    echoed = client.completions.create(**{**options, "prompt": [5, 6, 7], "n": 1, "max_tokens": 0}, echo=True)
    assert echoed.choices[0].logprobs is not None and echoed.choices[0].logprobs.token_logprobs is not None
    assert echoed.choices[0].logprobs.token_logprobs[0] is None


def test_stop(client: OpenAI) -> None:
    whole = client.completions.create(**GREEDY, prompt="one", max_tokens=12).choices[0].text
    stop = whole[5:8]
    choice = client.completions.create(**GREEDY, prompt="one", max_tokens=12, stop=[stop, "never"]).choices[0]
    assert (choice.text, choice.finish_reason) == (whole.split(stop)[0], "stop")
    extra = choice.model_extra
    assert extra is not None and extra["stop_reason"] == stop


@pytest.mark.parametrize("stream", [False, True])
def test_errors_are_typed_and_name_the_field(client: OpenAI, stream: bool) -> None:
    cases: tuple[tuple[dict[str, Any], type[openai.APIStatusError], str, str], ...] = (
        ({"temperature": 3e6}, openai.BadRequestError, "temperature", "invalid_value"),
        ({"max_tokens": 10**6}, openai.BadRequestError, "max_tokens", "context_length_exceeded"),
        ({"stop": ""}, openai.BadRequestError, "stop", "invalid_value"),
        ({"messages": [{"role": "x", "content": "y"}]}, openai.BadRequestError, "messages[0].role", "invalid_value"),
        ({"model": "other"}, openai.NotFoundError, "model", "model_not_found"),
        ({"audio": {"format": "wav", "voice": "x"}}, openai.BadRequestError, "audio", "unsupported_parameter"),
    )
    for fields, kind, param, code in cases:
        with pytest.raises(kind) as caught:
            client.chat.completions.create(**{"model": MODEL_NAME, "messages": HELLO, **fields}, stream=stream)
        error = caught.value
        assert (error.param, error.code) == (param, code), error
        assert error.request_id and error.body and error.type in ("invalid_request_error", "not_found_error")


def test_request_ids(client: OpenAI) -> None:
    answer = client.completions.with_raw_response.create(
        **GREEDY, prompt="x", max_tokens=1, extra_headers={"X-Request-Id": "mine-1"}
    )
    assert answer.headers["x-request-id"] == "mine-1" and answer.parse().id == "cmpl-mine-1"


def test_a_timeout_and_a_hang_up_free_the_engine(client: OpenAI, sim_server: ServerProcess) -> None:
    with pytest.raises(openai.APITimeoutError):
        client.with_options(timeout=0.5).completions.create(**LONG, prompt="one")
    wait_idle(sim_server)
    with client.chat.completions.create(**LONG, messages=HELLO, stream=True) as stream:
        for count, _ in enumerate(stream):
            if count == 5:
                break
    wait_idle(sim_server)
    assert sim_server.metrics()["enginecore:kv_cache_usage_perc"] == 0
    assert client.completions.create(**GREEDY, prompt="one", max_tokens=2).choices[0].text


async def test_async_client(async_client: AsyncOpenAI, sim_server: ServerProcess) -> None:
    async def plain(index: int) -> str:
        answer = await async_client.completions.create(**GREEDY, prompt=[5 + index, 6], max_tokens=8)
        text: str = answer.choices[0].text
        return text

    async def streamed(index: int) -> str:
        stream = await async_client.completions.create(**GREEDY, prompt=[5 + index, 6], max_tokens=8, stream=True)
        return "".join([chunk.choices[0].text async for chunk in stream])

    texts = await asyncio.gather(*(call(index) for call in (plain, streamed) for index in range(6)))
    assert texts[:6] == texts[6:] and len(set(texts)) == 6
    with pytest.raises(openai.BadRequestError):
        await async_client.chat.completions.create(model=MODEL_NAME, messages=[])
    task = asyncio.create_task(async_client.completions.create(**LONG, prompt="one"))
    stream = await async_client.chat.completions.create(**LONG, messages=HELLO, stream=True)
    async for _ in stream:
        task.cancel()
        break
    await stream.close()
    with pytest.raises(asyncio.CancelledError):
        await task
    await asyncio.to_thread(wait_idle, sim_server)


def test_keys(sim_server: ServerProcess) -> None:
    """The client's key is the bearer token that the server asks for."""
    with OpenAI(base_url=f"{sim_server.url}/v1", api_key="wrong", max_retries=0) as stranger:
        with pytest.raises(openai.AuthenticationError) as caught:
            stranger.models.list()
        assert caught.value.code == "invalid_api_key"
