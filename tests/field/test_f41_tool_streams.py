"""F41, F42: calls in a stream have the exact shape of the deltas, and are those of the plain answer.

Canned answers of every family, in every cut and with characters that need escapes, are in
tests/frontend/tools/test_parser.py and tests/server/test_chat_tools.py; here a real model is forced to call.
"""

from __future__ import annotations

import json
from typing import Any

import jsonschema_rs

from tests.field.answers import user
from tests.field.support import CHAT, counter
from tests.server.tool_checker import read_plain, read_stream
from tests.serving import ServerProcess

PARAMETERS = {"type": "object", "properties": {"city": {"enum": ["Łódź", "東京 😀", 'a "b" \\ {c}']},
              "days": {"type": "integer", "minimum": 1, "maximum": 14}}, "required": ["city", "days"]}  # fmt: skip
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": PARAMETERS}},
         {"type": "function", "function": {"name": "now"}}]  # fmt: skip


def ask(server: ServerProcess, n: int = 1, **body: Any) -> list[dict[str, Any]]:
    body = {"messages": [user("Weather?")], "tools": TOOLS, "temperature": 1, "seed": 5, "max_tokens": 120, "n": n,
            **body}  # fmt: skip
    plain = server.post(CHAT, body)
    assert plain.status_code == 200, plain.text
    choices = read_plain(plain.json())
    assert read_stream(server.post(CHAT, {**body, "stream": True}).text, n) == choices
    return choices


def test_forced_calls(server: ServerProcess) -> None:
    before = counter(server, "grammar_fast_forward_tokens_total")
    for choice in ask(server, n=3, tool_choice={"type": "function", "function": {"name": "weather"}}):
        assert choice["content"] is None and choice["finish_reason"] == "tool_calls"
        ((name, arguments),) = choice["calls"]
        assert name == "weather"
        jsonschema_rs.validate(PARAMETERS, json.loads(arguments))
        assert "\\u" not in arguments, "text is literal UTF-8"
    assert counter(server, "grammar_fast_forward_tokens_total") > before + 30


def test_one_call_when_that_is_asked_for(server: ServerProcess) -> None:
    (choice,) = ask(server, tool_choice="required", parallel_tool_calls=False)
    assert len(choice["calls"]) == 1
