"""F47: a list of text parts is the same prompt as the text, in every role."""

from __future__ import annotations

from typing import Any

import pytest

from tests.field.answers import both, rendered, user
from tests.field.support import CHAT, TOKENIZE, refused
from tests.serving import ServerProcess


def parts(*texts: str) -> list[dict[str, Any]]:
    return [{"type": "text", "text": each} for each in texts]


def conversation(make: Any) -> list[dict[str, Any]]:
    """One message of every role, contents by `make`."""
    roles = ("system", "user", "assistant", "tool", "user")
    return [
        {"role": role, "content": make(f"{role} says hello"), **({"tool_call_id": "c"} if role == "tool" else {})}
        for role in roles
    ]


def test_same_prompt_and_same_answer(server: ServerProcess) -> None:
    as_text, as_parts = conversation(str), conversation(parts)
    assert rendered(server, as_text) == rendered(server, as_parts)
    body: dict[str, Any] = {"temperature": 0, "max_tokens": 6}
    first, second = (both(server, CHAT, messages=each, **body) for each in (as_text, as_parts))
    assert first["usage"]["prompt_tokens"] == second["usage"]["prompt_tokens"]
    assert first["choices"] == second["choices"]


def test_several_parts_are_joined_with_a_newline(server: ServerProcess) -> None:
    assert rendered(server, [user(parts("a", "b c"))]) == rendered(server, [user("a\nb c")])


@pytest.mark.parametrize(
    ("content", "param"),
    [
        ([{"type": "image_url", "image_url": {"url": "x"}}], "messages[0].content[0].type"),
        ([{"type": "text"}], "messages[0].content[0].text"), ([{"text": "a"}], "messages[0].content[0].type"),
        ([{"type": "text", "text": "a"}, {"type": "text", "text": 5}], "messages[0].content[1].text"),
        ([5], "messages[0].content[0]"), (5, "messages[0].content"), ({}, "messages[0].content"),
    ],
)  # fmt: skip
def test_other_parts_are_refused(sim_server: ServerProcess, content: Any, param: str) -> None:
    for path in (CHAT, TOKENIZE):
        refused(sim_server.post(path, {"messages": [user(content)]}), param=param)
