"""F44: with tool_choice "none" the answer is text, whatever it looks like, and the template shows no tools."""

from __future__ import annotations

from typing import Any

from tests.field.answers import both, text, user
from tests.field.support import CHAT
from tests.frontend.toy import ToyTokenizer
from tests.server.checkers import check_chat, check_chat_stream
from tests.server.fake_engine import running, saying
from tests.serving import ServerProcess

TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
#: In the forms that models write calls in.
LOOKS_LIKE_A_CALL = '<tool_call>\n{"name": "weather", "arguments": {}}\n</tool_call>[TOOL_CALLS]'


class ToolTokenizer(ToyTokenizer):
    """Its template shows tools."""

    chat_template = "{% for t in tools or [] %}{{ t.function.name }};{% endfor %}" + ToyTokenizer.chat_template


async def test_content_is_untouched_and_tools_are_not_shown() -> None:
    async with running(saying(LOOKS_LIKE_A_CALL), tokenizer=ToolTokenizer(), max_model_len=256) as server:

        def prompt() -> str:
            return ToolTokenizer().decode(server.engine.requests[-1].prompt_token_ids)

        none: tuple[dict[str, Any], ...] = (
            {"tools": [TOOL], "tool_choice": "none"},
            {"tool_choice": "none"},
            {"tools": []},
        )
        for fields in none:
            body: dict[str, Any] = {"messages": [user("hi")], **fields}
            answers = (
                check_chat((await server.post(CHAT, **body)).json()),
                check_chat_stream((await server.post(CHAT, **body, stream=True)).text),
            )
            for answer in answers:
                (choice,) = answer["choices"]
                assert choice["message"]["content"] == LOOKS_LIKE_A_CALL and choice["finish_reason"] == "stop"
                assert not choice["message"].get("tool_calls")
            assert "weather" not in prompt()
        await server.post(CHAT, messages=[user("hi")], tools=[TOOL])
        assert "weather;" in prompt(), "the template would show them"


def test_same_answer_as_without_tools(server: ServerProcess) -> None:
    body: dict[str, Any] = {"messages": [user("What is the capital of France?")], "temperature": 0, "max_tokens": 12}
    assert text(both(server, CHAT, **body, tools=[TOOL], tool_choice="none")) == text(both(server, CHAT, **body))
