"""F15: JSON nested deep is a 400, wherever it stands."""

from __future__ import annotations

from typing import Any

import pytest

from tests.field.support import CHAT, COMPLETIONS, DETOKENIZE, TOKENIZE, post_raw, refused, unharmed
from tests.serving import ServerProcess

#: The documented bound is 128 levels in all; 100 is fine.
FINE, DEEP = 100, (1000, 10_000, 100_000)


def _arrays(depth: int) -> str:
    return "[" * depth + "]" * depth


def _objects(depth: int) -> str:
    return '{"a":' * depth + "1" + "}" * depth


PLACES = {
    "the body": "VALUE",
    "metadata": '{"messages": [{"role": "user", "content": "a"}], "max_tokens": 1, "metadata": {"a": VALUE}}',
    "parameters": '{"messages": [{"role": "user", "content": "a"}], "max_tokens": 1, "tools": [{"type": "function", '
    '"function": {"name": "f", "parameters": VALUE}}]}',
    "schema": '{"messages": [{"role": "user", "content": "a"}], "response_format": {"type": "json_schema", '
    '"json_schema": {"schema": VALUE}}}',
    "content": '{"messages": [{"role": "user", "content": VALUE}]}',
    "unknown": '{"prompt": "a", "max_tokens": 1, "whatever": VALUE}',
}


@pytest.mark.parametrize("place", PLACES)
def test_in_the_body(sim_server: ServerProcess, place: str) -> None:
    with unharmed(sim_server):
        for depth in DEEP:
            for value in (_arrays(depth), _objects(depth), "[" * depth):
                body = PLACES[place].replace("VALUE", value).encode()
                for path in (CHAT, COMPLETIONS, TOKENIZE, DETOKENIZE):
                    assert refused(post_raw(sim_server, path, body))["code"] == "nesting_too_deep"


def test_in_arguments_of_an_earlier_call(sim_server: ServerProcess) -> None:
    """JSON inside a string, which the template would get parsed."""

    def body(arguments: str) -> dict[str, Any]:
        call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": arguments}}
        return {
            "max_tokens": 1,
            "messages": [
                {"role": "user", "content": "a"},
                {"role": "assistant", "content": None, "tool_calls": [call]},
                {"role": "tool", "tool_call_id": "c1", "content": "b"},
            ],
        }

    with unharmed(sim_server):
        for depth in DEEP:
            for arguments in (_arrays(depth), _objects(depth)):
                for path in (CHAT, TOKENIZE):
                    refused(
                        sim_server.post(path, body(arguments)), 400, "messages[1].tool_calls[0].function.arguments"
                    )
        assert sim_server.post(CHAT, body(_objects(FINE))).status_code == 200


def test_moderate_depth_is_fine(sim_server: ServerProcess) -> None:
    for place in ("metadata", "parameters"):
        body = PLACES[place].replace("VALUE", _objects(FINE)).encode()
        assert post_raw(sim_server, CHAT, body).status_code == 200


def test_brackets_in_text_are_text(sim_server: ServerProcess) -> None:
    answer = sim_server.post(COMPLETIONS, {"prompt": "[{" * 300 + '"' + "}]" * 5, "max_tokens": 1})
    assert answer.status_code == 200, answer.text
