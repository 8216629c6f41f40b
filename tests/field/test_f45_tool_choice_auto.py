"""F45: "auto" leaves decoding free: the tokens are those of a plain completion of the rendered prompt."""

from __future__ import annotations

from typing import Any

import pytest

from tests.field.answers import both, rendered, user
from tests.field.support import CHAT, COMPLETIONS
from tests.serving import ServerProcess

TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}


@pytest.mark.parametrize("choice", [None, "auto"])
def test_a_greeting_may_be_answered_in_text(server: ServerProcess, choice: str | None) -> None:
    messages = [user("What is the capital of France?")]
    body: dict[str, Any] = {"temperature": 0, "max_tokens": 12, "return_token_ids": True}
    chat = both(server, CHAT, messages=messages, tools=[TOOL], tool_choice=choice, **body)
    prompt = rendered(server, messages, tools=[TOOL])
    plain = both(server, COMPLETIONS, prompt=prompt, **body)
    assert chat["prompt_token_ids"] == prompt
    assert chat["choices"][0]["token_ids"] == plain["choices"][0]["token_ids"]
    assert chat["choices"][0]["finish_reason"] == "stop" and "Paris" in chat["choices"][0]["message"]["content"]
