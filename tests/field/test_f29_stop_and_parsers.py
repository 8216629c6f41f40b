"""F29: a stop string in an answer that is taken apart loses nothing, plainly and in a stream."""

from __future__ import annotations

from typing import Any

from tests.field.answers import user
from tests.field.support import CHAT
from tests.server.tool_checker import read_plain, read_stream
from tests.serving import ServerProcess

TOOL = {"type": "function", "function": {"name": "weather", "parameters": {
    "type": "object", "properties": {"city": {"enum": ["Paris or London"]}}, "required": ["city"]}}}  # fmt: skip


def same(server: ServerProcess, **body: Any) -> dict[str, Any]:
    body = {"messages": [user("What is the capital of France?")], "temperature": 0, "max_tokens": 40, **body}
    (plain,) = read_plain(server.post(CHAT, body).json())
    assert read_stream(server.post(CHAT, {**body, "stream": True}).text) == [plain]
    return plain


def test_text_before_the_stop_is_delivered(server: ServerProcess) -> None:
    whole = same(server, tools=[TOOL])["content"]
    cut = same(server, tools=[TOOL], stop=["Paris"])
    assert cut["content"] == whole.partition("Paris")[0] and cut["finish_reason"] == "stop"


def test_half_a_call_is_not_lost(server: ServerProcess) -> None:
    cut = same(server, tools=[TOOL], tool_choice="required", stop=[" or "])
    assert cut == {"content": None, "calls": [["weather", '{"city": "Paris']], "finish_reason": "stop"}
