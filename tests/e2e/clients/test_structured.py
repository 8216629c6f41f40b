"""Calls of functions and structured answers through the official clients, whose typed models parse every reply."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, Literal

import anthropic
import pytest
from openai import OpenAI, pydantic_function_tool
from pydantic import BaseModel, Field

from tests.e2e.clients.conftest import KEY
from tests.serving import MODEL_NAME, ServerProcess

HELLO: list[Any] = [{"role": "user", "content": "What is the weather in Paris?"}]


class Weather(BaseModel):
    """Weather of a place."""

    city: str = Field(max_length=12)
    days: int = Field(ge=1, le=14)
    unit: Literal["c", "f"]


TOOLS: list[Any] = [pydantic_function_tool(Weather, name="weather")]
FORCED: dict[str, Any] = {"model": MODEL_NAME, "messages": HELLO, "tools": TOOLS, "tool_choice": "required", "seed": 3,
                          "parallel_tool_calls": False, "max_tokens": 120}  # fmt: skip


@pytest.fixture(scope="module")
def client(server: ServerProcess) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{server.url}/v1", api_key=KEY, max_retries=0, timeout=60) as client:
        yield client


def test_a_forced_call_plain_parsed_and_streamed(client: OpenAI) -> None:
    plain = client.chat.completions.create(**FORCED).choices[0]
    assert plain.finish_reason == "tool_calls" and plain.message.content is None and plain.message.tool_calls
    function = plain.message.tool_calls[0].function  # type: ignore[union-attr]
    parsed = client.chat.completions.parse(**FORCED).choices[0].message.tool_calls
    assert parsed and parsed[0].function.parsed_arguments == Weather.model_validate_json(function.arguments)
    with client.chat.completions.stream(**FORCED) as stream:
        events = [event.type for event in stream]
        final = stream.get_final_completion().choices[0]
    assert events.count("tool_calls.function.arguments.done") == 1
    assert events.count("tool_calls.function.arguments.delta") > 3
    assert final.message.tool_calls and final.finish_reason == "tool_calls"
    assert final.message.tool_calls[0].function.arguments == function.arguments
    assert final.message.tool_calls[0].function.name == "weather"


def test_a_call_can_be_answered(client: OpenAI) -> None:
    message = client.chat.completions.create(**FORCED).choices[0].message
    assert message.tool_calls
    answer: Any = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "Sunny, 20 degrees."}
    messages = [*HELLO, message, answer]
    after = client.chat.completions.create(model=MODEL_NAME, messages=messages, tools=TOOLS, max_tokens=8)
    assert after.choices[0].message.content


class Person(BaseModel):
    name: str = Field(max_length=12)
    age: int = Field(ge=0, le=120)
    likes: list[Literal["tea", "coffee"]] = Field(max_length=2)


def test_a_parsed_answer(client: OpenAI) -> None:
    messages: list[Any] = [{"role": "user", "content": "A person, as JSON."}]
    options: dict[str, Any] = {"model": MODEL_NAME, "messages": messages, "response_format": Person, "temperature": 1,
                               "seed": 1, "max_tokens": 120}  # fmt: skip
    choice = client.chat.completions.parse(**options).choices[0]
    assert choice.finish_reason == "stop" and isinstance(choice.message.parsed, Person)
    with client.chat.completions.stream(**options) as stream:
        final = stream.get_final_completion().choices[0]
    assert final.message.parsed == choice.message.parsed


def test_a_parsed_response(client: OpenAI) -> None:
    response = client.responses.parse(
        model=MODEL_NAME, input="A person, as JSON.", text_format=Person, max_output_tokens=120, temperature=0
    )
    assert isinstance(response.output_parsed, Person)


def test_function_tools_of_responses(client: OpenAI) -> None:
    tool: Any = {"type": "function", "name": "weather", "parameters": Weather.model_json_schema(), "strict": True}
    options: dict[str, Any] = {"model": MODEL_NAME, "input": "Weather?", "tools": [tool], "tool_choice": "required",
                               "parallel_tool_calls": False, "temperature": 0, "max_output_tokens": 120}  # fmt: skip
    (item,) = client.responses.create(**options).output
    assert item.type == "function_call" and item.name == "weather"
    Weather.model_validate_json(item.arguments)
    with client.responses.stream(**options) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_response()
    assert kinds.count("response.function_call_arguments.done") == 1
    assert final.output[0].arguments == item.arguments  # type: ignore[union-attr]


def test_tool_use_of_messages(server: ServerProcess) -> None:
    tool: Any = {"name": "weather", "description": "Weather", "input_schema": Weather.model_json_schema()}
    options: dict[str, Any] = {"model": MODEL_NAME, "max_tokens": 120, "messages": HELLO, "tools": [tool],
                               "extra_body": {"temperature": 0},
                               "tool_choice": {"type": "tool", "name": "weather"}}  # fmt: skip
    with anthropic.Anthropic(base_url=server.url, api_key=KEY, max_retries=0, timeout=60) as messenger:
        plain = messenger.messages.create(**options)
        with messenger.messages.stream(**options) as stream:
            parts = [event.partial_json for event in stream if event.type == "input_json"]
            final = stream.get_final_message()
    (block,) = plain.content
    assert plain.stop_reason == final.stop_reason == "tool_use" and block.type == "tool_use"
    assert Weather.model_validate(block.input) and final.content[0].input == block.input  # type: ignore[union-attr]
    assert len(parts) > 3 and json.loads("".join(parts)) == block.input
