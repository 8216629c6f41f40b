"""OpenAI's own Python client against a real server with the real model."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import openai
import pytest
from openai.types.chat import ChatCompletionMessageParam

from tests.serving import MODEL_NAME, SMALL, ServerProcess

KEY = "secret"
MESSAGES: list[ChatCompletionMessageParam] = [{"role": "user", "content": "What is the capital of France?"}]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    log = tmp_path_factory.mktemp("openai") / "server.log"
    with ServerProcess(*SMALL, "--api-key", KEY, log=log) as server:
        yield server


@pytest.fixture
def client(server: ServerProcess) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=server.url + "/v1", api_key=KEY, max_retries=0, timeout=60) as client:
        yield client


def test_chat_and_its_stream(client: openai.OpenAI) -> None:
    plain = client.chat.completions.create(
        model=MODEL_NAME, messages=MESSAGES, temperature=0, max_completion_tokens=24, logprobs=True, top_logprobs=3
    )
    choice = plain.choices[0]
    assert choice.message.role == "assistant" and "Paris" in (choice.message.content or "")
    assert (
        plain.usage is not None
        and plain.usage.total_tokens == plain.usage.prompt_tokens + plain.usage.completion_tokens
    )
    assert choice.logprobs is not None and choice.logprobs.content is not None
    assert len(choice.logprobs.content) == plain.usage.completion_tokens
    shown = b"".join(bytes(entry.bytes or []) for entry in choice.logprobs.content)
    assert shown.decode() == choice.message.content

    text, finish, usage = "", None, None
    with client.chat.completions.create(
        model=MODEL_NAME, messages=MESSAGES, temperature=0, max_completion_tokens=24, stream=True,
        stream_options={"include_usage": True},
    ) as stream:  # fmt: skip
        for chunk in stream:
            usage = chunk.usage or usage
            for part in chunk.choices:
                text += part.delta.content or ""
                finish = part.finish_reason or finish
    assert (text, finish) == (choice.message.content, choice.finish_reason)
    assert usage is not None and usage.completion_tokens == plain.usage.completion_tokens
    assert usage.prompt_tokens_details is not None and (usage.prompt_tokens_details.cached_tokens or 0) > 0


def test_completions(client: openai.OpenAI) -> None:
    answer = client.completions.create(
        model=MODEL_NAME, prompt=["The sky is", "Water is"], n=2, max_tokens=5, temperature=0, echo=True, logprobs=1
    )
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert answer.choices[0].text == answer.choices[1].text and answer.choices[0].text.startswith("The sky is")
    logprobs = answer.choices[2].logprobs
    assert logprobs is not None and "".join(logprobs.tokens or []) == answer.choices[2].text
    stream = client.completions.create(model=MODEL_NAME, prompt="Water is", max_tokens=5, temperature=0, stream=True)
    assert "Water is" + "".join(chunk.choices[0].text for chunk in stream) == answer.choices[2].text


def test_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == [MODEL_NAME]
    assert client.models.retrieve(MODEL_NAME).id == MODEL_NAME


def test_errors(client: openai.OpenAI, server: ServerProcess) -> None:
    with pytest.raises(openai.BadRequestError) as bad:
        client.chat.completions.create(model=MODEL_NAME, messages=MESSAGES, temperature=-1)
    assert bad.value.param == "temperature" and bad.value.type == "invalid_request_error"
    with pytest.raises(openai.BadRequestError) as long:
        client.completions.create(model=MODEL_NAME, prompt="word " * 3000)
    assert long.value.code == "context_length_exceeded"
    with pytest.raises(openai.NotFoundError) as unknown:
        client.chat.completions.create(model="gpt-5", messages=MESSAGES)
    assert unknown.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError):
        client.chat.completions.create(model=MODEL_NAME, messages=MESSAGES, max_tokens=10**6, stream=True)
    stranger = openai.OpenAI(base_url=server.url + "/v1", api_key="wrong", max_retries=0)
    with stranger, pytest.raises(openai.AuthenticationError):
        stranger.models.list()


async def test_async_client_many_at_once_and_hanging_up(server: ServerProcess) -> None:
    import asyncio

    async with openai.AsyncOpenAI(base_url=server.url + "/v1", api_key=KEY, max_retries=0, timeout=60) as client:

        async def one(index: int) -> str:
            text = ""
            stream = await client.completions.create(
                model=MODEL_NAME, prompt=f"Number {index} is", max_tokens=12, temperature=0, stream=True
            )
            async for chunk in stream:
                text += chunk.choices[0].text
                if index % 3 == 0:
                    await stream.close()
                    break
            return text

        together = await asyncio.gather(*(one(i) for i in range(12)))
        alone = [await one(i) for i in (1, 2, 4)]
    assert alone == [together[i] for i in (1, 2, 4)]
    for _ in range(200):
        if server.metrics()["enginecore:num_requests_running"] == 0:
            break
        await asyncio.sleep(0.05)
    assert server.metrics()["enginecore:num_requests_running"] == 0


def test_log_has_no_traceback(server: ServerProcess, tmp_path: Path) -> None:
    assert "Traceback" not in server.log.read_text()
