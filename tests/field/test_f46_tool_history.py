"""F46: arguments of calls in the history become objects for the template; malformed ones pass as text, never a 500."""

from __future__ import annotations

from typing import Any

import pytest

from tests.field.answers import both, user
from tests.field.support import CHAT, live, refused
from tests.frontend.toy import ToyTokenizer
from tests.server.fake_engine import parrot, running
from tests.serving import ServerProcess

ARGUMENTS: list[tuple[Any, str]] = [
    ('{"city": "Łódź", "days": 2}', "{'city': 'Łódź', 'days': 2}"), ("", "{}"), (None, "{}"), ("{}", "{}"),
    ({"city": "x"}, "{'city': 'x'}"), ("{bad", "{bad"), ("[1]", "[1]"), ('"str"', '"str"'),
    ("null", "null"), ("NaN", "NaN"),
]  # fmt: skip


def history(arguments: Any) -> list[dict[str, Any]]:
    call: dict[str, Any] = {"id": "call_1", "type": "function", "function": {"name": "weather"}}
    if arguments is not None:
        call["function"]["arguments"] = arguments
    return [
        user("hi"),
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": [{"type": "text", "text": "sunny"}]},
    ]


class CallTokenizer(ToyTokenizer):
    """Its template shows calls and which answer belongs to which."""

    chat_template = (
        "{% for m in messages %}{{ m.role }}={{ m.content }}{{ m.tool_call_id or '' }}"
        "{% for c in m.tool_calls or [] %}{{ c.function.name }}:{{ c.function.arguments }};{% endfor %}|{% endfor %}"
    )


async def test_what_the_template_gets() -> None:
    async with running(parrot, tokenizer=CallTokenizer(), max_model_len=512) as server:
        for arguments, shown in ARGUMENTS:
            answer = await server.post(CHAT, messages=history(arguments), max_tokens=1)
            assert answer.status_code == 200, (arguments, answer.text)
            text = server.llm.tokenizer.decode(server.engine.requests[-1].prompt_token_ids)
            assert text == f"user=hi|assistant=weather:{shown};|tool=sunnycall_1|"


def test_on_a_template_that_knows_no_tools(server: ServerProcess) -> None:
    for arguments, _ in ARGUMENTS[::3]:
        both(server, CHAT, messages=history(arguments), max_tokens=2, temperature=0)


@pytest.mark.parametrize(
    ("calls", "param"),
    [
        ("x", "messages[1].tool_calls"), ([5], "messages[1].tool_calls[0].function"),
        ([{}], "messages[1].tool_calls[0].function"),
        ([{"function": {"arguments": "{}"}}], "messages[1].tool_calls[0].function.name"),
        ([{"function": {"name": "f", "arguments": "[" * 10_000}}], "messages[1].tool_calls[0].function.arguments"),
    ],
)  # fmt: skip
def test_calls_that_are_none(sim_server: ServerProcess, calls: Any, param: str) -> None:
    messages = [user("hi"), {"role": "assistant", "tool_calls": calls}]
    refused(sim_server.post(CHAT, {"messages": messages}), param=param)
    live(sim_server)
