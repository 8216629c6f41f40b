"""The official clients and the real model: what they parse into their types, plain or as a stream, is the contract."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import anthropic
import openai
import pydantic
import pytest

from tests.e2e.clients.conftest import KEY
from tests.serving import MODEL_NAME, ServerProcess

HELLO: list[Any] = [{"role": "user", "content": "Hello, who are you?"}]
MESSAGE: dict[str, Any] = {"model": MODEL_NAME, "max_tokens": 16, "messages": HELLO, "extra_body": {"temperature": 0}}


@pytest.fixture(scope="module")
def messenger(server: ServerProcess) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=server.url, api_key=KEY, max_retries=0, timeout=60) as client:
        yield client


def test_messages(messenger: anthropic.Anthropic, server: ServerProcess) -> None:
    """Plainly, as a stream and through OpenAI's route, the model says the same."""
    plain = messenger.messages.create(**MESSAGE)
    with messenger.messages.stream(**MESSAGE) as stream:
        texts = list(stream.text_stream)
        whole = stream.get_final_message()
    assert plain.content[0].type == "text" and len(texts) > 5
    assert "".join(texts) == plain.content[0].text == whole.content[0].text  # type: ignore[union-attr]
    assert plain.stop_reason == whole.stop_reason == "max_tokens" and plain.usage == whole.usage
    assert messenger.messages.count_tokens(model=MODEL_NAME, messages=HELLO).input_tokens == plain.usage.input_tokens
    chat = {"model": MODEL_NAME, "messages": HELLO, "max_tokens": 16, "temperature": 0}
    answer = server.post("/v1/chat/completions", chat, headers={"x-api-key": KEY}).json()
    assert answer["choices"][0]["message"]["content"] == plain.content[0].text
    assert answer["usage"]["prompt_tokens"] == plain.usage.input_tokens


def test_messages_with_a_stop_sequence_and_a_prefill(messenger: anthropic.Anthropic) -> None:
    text: str = messenger.messages.create(**MESSAGE).content[0].text
    stop = text[8:12]
    cut = messenger.messages.create(**MESSAGE, stop_sequences=[stop, "never"])
    assert (cut.stop_reason, cut.stop_sequence) == ("stop_sequence", stop)
    assert cut.content[0].text == text.split(stop)[0]
    prefill = {**MESSAGE, "messages": [*HELLO, {"role": "assistant", "content": text[:20]}], "max_tokens": 5}
    more: str = messenger.messages.create(**prefill).content[0].text
    assert more and not text.startswith(more), "it goes on from the prefill, and does not repeat it"


def test_messages_tell_what_the_cache_held(messenger: anthropic.Anthropic) -> None:
    system: list[Any] = [{"type": "text", "text": "Be brief. " * 30, "cache_control": {"type": "ephemeral"}}]
    first = messenger.messages.create(**MESSAGE, system=system).usage
    again = messenger.messages.create(**MESSAGE, system=system).usage
    assert (first.cache_read_input_tokens or 0) < 32 and (first.cache_creation_input_tokens or 0) > 60
    assert (again.cache_read_input_tokens or 0) > 60 and again.cache_creation_input_tokens == 0


def test_messages_errors_are_typed(messenger: anthropic.Anthropic) -> None:
    cases: tuple[tuple[dict[str, Any], type[anthropic.APIStatusError]], ...] = (
        ({"max_tokens": 0}, anthropic.BadRequestError),
        ({"messages": [{"role": "user", "content": "x " * 5000}]}, anthropic.BadRequestError),
        ({"model": "other"}, anthropic.NotFoundError),
    )
    for change, kind in cases:
        with pytest.raises(kind) as caught:
            messenger.messages.create(**{**MESSAGE, **change})
        assert caught.value.request_id and caught.value.type in ("invalid_request_error", "not_found_error")


@pytest.fixture(scope="module")
def gpt(server: ServerProcess) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key=KEY, max_retries=0, timeout=60) as client:
        yield client


RESPONSE: dict[str, Any] = {"model": MODEL_NAME, "max_output_tokens": 16, "temperature": 0}


def test_responses(gpt: openai.OpenAI, server: ServerProcess) -> None:
    plain = gpt.responses.create(**RESPONSE, input="Hello, who are you?")
    with gpt.responses.stream(**RESPONSE, input=HELLO) as stream:
        deltas = [event.delta for event in stream if event.type == "response.output_text.delta"]
    assert plain.status == "incomplete" and plain.incomplete_details is not None
    assert plain.incomplete_details.reason == "max_output_tokens" and len(deltas) > 5
    assert "".join(deltas) == plain.output_text
    chat = {"model": MODEL_NAME, "messages": HELLO, "max_tokens": 16, "temperature": 0}
    answer = server.post("/v1/chat/completions", chat, headers={"x-api-key": KEY}).json()
    assert answer["choices"][0]["message"]["content"] == plain.output_text
    assert plain.usage is not None and plain.usage.input_tokens == answer["usage"]["prompt_tokens"]


def test_responses_are_kept_and_continued(gpt: openai.OpenAI) -> None:
    first = gpt.responses.create(**RESPONSE, input="My name is Ada.", instructions="Be brief.")
    assert gpt.responses.retrieve(first.id).output_text == first.output_text
    second = gpt.responses.create(**RESPONSE, input="What is my name?", previous_response_id=first.id)
    items = gpt.responses.input_items.list(second.id, order="asc").data
    assert [item.type for item in items] == ["message"] * 3
    turns = ({"role": "user", "content": text} for text in ("My name is Ada.", "What is my name?"))
    again = gpt.responses.create(**RESPONSE, input=[next(turns), *first.output, next(turns)])  # type: ignore[list-item]
    assert again.output_text == second.output_text, "its own output, sent back by the client, is the same conversation"
    gpt.responses.delete(first.id)
    with pytest.raises(openai.NotFoundError):
        gpt.responses.retrieve(first.id)


def test_a_response_in_the_background(gpt: openai.OpenAI) -> None:
    long = {**RESPONSE, "max_output_tokens": 900, "extra_body": {"ignore_eos": True}}
    started = gpt.responses.create(**long, input="Count.", background=True)
    assert started.status == "queued"
    events = gpt.responses.retrieve(started.id, stream=True)
    kinds = []
    for event in events:
        kinds.append(event.type)
        if event.type == "response.output_text.delta":
            break
    events.close()
    assert kinds[:3] == ["response.created", "response.queued", "response.in_progress"]
    cancelled = gpt.responses.cancel(started.id)
    assert cancelled.status == "cancelled" and cancelled.output_text


WEATHER: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 20},
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
}
ASK = "What will the weather be in Rome for three days?"


def check_weather(given: Any) -> None:
    assert set(given) == {"city", "days"} and isinstance(given["city"], str) and 1 <= given["days"] <= 9


def test_a_call_through_each_client(messenger: anthropic.Anthropic, gpt: openai.OpenAI) -> None:
    """The call is forced, so that it is valid whatever the model thinks, plainly and as a stream."""
    message: dict[str, Any] = {
        "model": MODEL_NAME, "max_tokens": 200, "messages": [{"role": "user", "content": ASK}],
        "tools": [{"name": "weather", "input_schema": WEATHER}],
        "tool_choice": {"type": "any", "disable_parallel_tool_use": True},
        "extra_body": {"temperature": 1, "seed": 7},
    }  # fmt: skip
    plain = messenger.messages.create(**message)
    with messenger.messages.stream(**message) as stream:
        fragments = [event.partial_json for event in stream if event.type == "input_json"]
        whole = stream.get_final_message()
    block = plain.content[-1]
    assert plain.stop_reason == whole.stop_reason == "tool_use" and block.type == "tool_use"
    check_weather(block.input)
    assert len(fragments) > 2 and json.loads("".join(fragments)) == block.input == whole.content[-1].input  # type: ignore[union-attr]
    result = {"type": "tool_result", "tool_use_id": block.id, "content": "sunny"}
    told = messenger.messages.create(**{
        **message, "messages": [*message["messages"], {"role": "assistant", "content": plain.content},
                                {"role": "user", "content": [result]}], "tool_choice": {"type": "none"},
    })  # fmt: skip
    assert [each.type for each in told.content] == ["text"]

    tool: Any = {"type": "function", "name": "weather", "parameters": WEATHER, "strict": True}
    response: dict[str, Any] = {
        "model": MODEL_NAME, "input": ASK, "tools": [tool], "tool_choice": "required", "temperature": 1,
        "parallel_tool_calls": False,
        "extra_body": {"seed": 7},
    }  # fmt: skip
    answer = gpt.responses.create(**response)
    with gpt.responses.stream(**response) as events:
        deltas = [event.delta for event in events if event.type == "response.function_call_arguments.delta"]
        final = events.get_final_response()
    call, same = answer.output[-1], final.output[-1]
    assert call.type == same.type == "function_call" and call.arguments == same.arguments == "".join(deltas)
    check_weather(json.loads(call.arguments))
    output: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}
    follow_up = gpt.responses.create(**RESPONSE, input=[output], previous_response_id=answer.id)
    assert follow_up.output_text

    chat = gpt.chat.completions.create(
        model=MODEL_NAME, messages=[{"role": "user", "content": ASK}], tool_choice="required", seed=7,
        parallel_tool_calls=False,
        tools=[{"type": "function", "function": {"name": "weather", "parameters": WEATHER}}],
    )  # fmt: skip
    assert chat.choices[0].finish_reason == "tool_calls" and chat.choices[0].message.tool_calls is not None
    made = chat.choices[0].message.tool_calls[0]
    assert made.type == "function" and json.loads(made.function.arguments) == json.loads(call.arguments)


class Person(pydantic.BaseModel):
    name: str
    age: int


def test_parsed_answers(gpt: openai.OpenAI) -> None:
    """The client's own classes as the form of an answer."""
    limits: dict[str, Any] = {"model": MODEL_NAME, "temperature": 0}
    parsed = gpt.responses.parse(**limits, max_output_tokens=100, input="Ada is 36.", text_format=Person)
    assert isinstance(parsed.output_parsed, Person)
    messages: list[Any] = [{"role": "user", "content": "Ada is 36."}]
    chat = gpt.chat.completions.parse(**limits, max_tokens=100, messages=messages, response_format=Person)
    assert chat.choices[0].message.parsed == parsed.output_parsed
