"""F43: a call that max_tokens cuts is never said to be complete."""

from __future__ import annotations

from tests.field.answers import user
from tests.field.support import CHAT
from tests.server.tool_checker import read_plain, read_stream
from tests.serving import ServerProcess

PARAMETERS = {"type": "object", "properties": {"text": {"type": "string", "minLength": 400}}, "required": ["text"]}
TOOL = {"type": "function", "function": {"name": "say", "parameters": PARAMETERS}}


def test_length(server: ServerProcess) -> None:
    for limit in (3, 24):
        body = {"messages": [user("Tell me.")], "tools": [TOOL], "tool_choice": "required", "max_tokens": limit}
        (choice,) = read_plain(server.post(CHAT, body).json())
        (streamed,) = read_stream(server.post(CHAT, {**body, "stream": True, "seed": 1}).text)
        assert choice["finish_reason"] == streamed["finish_reason"] == "length"
        assert choice["content"] is None and [name for name, _ in choice["calls"]] == ["say"] * (limit > 3)


def test_messages_and_responses_say_so_too(server: ServerProcess) -> None:
    tool = {"name": "say", "input_schema": PARAMETERS}
    message = {"model": "smollm2", "messages": [user("Tell me.")], "max_tokens": 24, "tools": [tool],
               "tool_choice": {"type": "any"}}  # fmt: skip
    assert server.post("/v1/messages", message).json()["stop_reason"] == "max_tokens"
    function = {"type": "function", "name": "say", "parameters": PARAMETERS, "strict": False}
    body = {"model": "smollm2", "input": "Tell me.", "tools": [function], "tool_choice": "required",
            "max_output_tokens": 24}  # fmt: skip
    answer = server.post("/v1/responses", body).json()
    assert (answer["status"], answer["incomplete_details"]["reason"]) == ("incomplete", "max_output_tokens")
