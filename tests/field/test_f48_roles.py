"""F48: developer is system where the template has no such role; unknown roles and what a template refuses are 400s."""

from __future__ import annotations

from typing import Any

import pytest

from tests.field.answers import both, rendered, user
from tests.field.support import CHAT, TOKENIZE, refused
from tests.frontend.toy import ToyTokenizer
from tests.server.checkers import check_error
from tests.server.fake_engine import parrot, running
from tests.serving import ServerProcess


def said(role: str, content: str) -> dict[str, Any]:
    return {"role": role, "content": content}


def test_developer_is_system(server: ServerProcess) -> None:
    assert rendered(server, [said("developer", "Be brief."), user("hi")]) == rendered(
        server, [said("system", "Be brief."), user("hi")]
    )
    both_roles = rendered(server, [said("system", "One."), said("developer", "Two."), user("hi")])
    assert both_roles == rendered(server, [said("system", "One."), said("system", "Two."), user("hi")])


def test_turns_that_the_template_permits(server: ServerProcess) -> None:
    for messages in (
        [user("a"), user("b")],
        [user("a"), said("assistant", "b"), said("system", "c"), user("d")],
        [said("assistant", "a"), said("assistant", "b")],
    ):
        answer = both(server, CHAT, messages=messages, temperature=0, max_tokens=2)
        assert answer["usage"]["prompt_tokens"] == len(rendered(server, messages))


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ({"role": "foo", "content": "x"}, "messages[0].role"), ({"content": "x"}, "messages[0].role"),
        ({"role": 5, "content": "x"}, "messages[0].role"), ({"role": None, "content": "x"}, "messages[0].role"),
        ({"role": "function", "content": "x"}, "messages[0].role"), ("x", "messages[0]"),
        ({"role": "tool", "content": "x"}, "messages[0].tool_call_id"),
        ({"role": "user", "content": None}, "messages[0].content"),
    ],
)  # fmt: skip
def test_messages_that_are_refused(sim_server: ServerProcess, message: Any, param: str) -> None:
    for path in (CHAT, TOKENIZE):
        refused(sim_server.post(path, {"messages": [message]}), param=param)


class StrictTokenizer(ToyTokenizer):
    """Takes one system message in front and alternating turns."""

    chat_template = (
        "{% if messages[0].role == 'system' %}<{{ messages[0].content }}>{% set rest = messages[1:] %}"
        "{% else %}{% set rest = messages %}{% endif %}"
        "{% for m in rest %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
        "{{ raise_exception('turns must alternate') }}{% endif %}{{ m.content }}|{% endfor %}"
    )


async def test_a_template_with_rules() -> None:
    async with running(parrot, tokenizer=StrictTokenizer()) as server:

        async def prompt(*messages: dict[str, Any]) -> str:
            answer = await server.post(CHAT, messages=list(messages), max_tokens=1)
            assert answer.status_code == 200, answer.text
            text: str = server.llm.tokenizer.decode(server.engine.requests[-1].prompt_token_ids)
            return text

        merged = await prompt(said("system", "s"), said("developer", "d"), user("u"))
        assert merged == "<s\n\nd>u|", "system and developer are merged in order"
        assert await prompt(user("u"), said("assistant", "a"), said("system", "s"), user("v")) == "<s>u|a|v|"
        for stream in (False, True):
            answer = await server.post(CHAT, messages=[user("a"), user("b")], stream=stream)
            error = check_error(answer.status_code, answer.content, 400, "messages")
            assert "turns must alternate" in error["message"]
