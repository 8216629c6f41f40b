"""F37: defaults and limits of max_tokens."""

from __future__ import annotations

from typing import Any

import pytest

from tests.field.answers import both, rendered, user
from tests.field.support import CHAT, COMPLETIONS, refused, unharmed
from tests.serving import ServerProcess

LIMIT = 1024
OPEN: dict[str, Any] = {"temperature": 0, "ignore_eos": True}
ROUTES: dict[str, dict[str, Any]] = {COMPLETIONS: {"prompt": "x"}, CHAT: {"messages": [user("x")]}}


def generated(answer: dict[str, Any]) -> int:
    """How many tokens; they ended because of the limit."""
    assert [choice["finish_reason"] for choice in answer["choices"]] == ["length"]
    count: int = answer["usage"]["completion_tokens"]
    return count


def test_defaults(sim_server: ServerProcess) -> None:
    assert generated(both(sim_server, prompt="x", **OPEN)) == 16
    assert generated(both(sim_server, prompt=[5] * (LIMIT - 3), **OPEN)) == 3, "the default gives way to the context"
    assert generated(both(sim_server, prompt="x", max_tokens=None, **OPEN)) == 16
    messages = [user(" a" * 950)]
    left = LIMIT - len(rendered(sim_server, messages))
    assert generated(both(sim_server, CHAT, messages=messages, **OPEN)) == left > 0


def test_exactly_what_was_asked_for(sim_server: ServerProcess) -> None:
    for path, content in ROUTES.items():
        for count in (1, 5):
            assert generated(both(sim_server, path, **content, **OPEN, max_tokens=count)) == count
    chat = ROUTES[CHAT]
    assert generated(both(sim_server, CHAT, **chat, **OPEN, max_completion_tokens=4, max_tokens=9)) == 4
    assert generated(both(sim_server, CHAT, **chat, **OPEN, max_completion_tokens=9, max_tokens=4)) == 9
    assert generated(both(sim_server, prompt=[5] * (LIMIT - 5), **OPEN, max_tokens=5)) == 5, "the last token that fits"


def test_more_than_fits(sim_server: ServerProcess) -> None:
    error = refused(sim_server.post(COMPLETIONS, {"prompt": [5] * 1000, "max_tokens": 25}), param="max_tokens")
    assert all(word in error["message"].split() for word in ("1024", "1000", "25"))
    for path, content in ROUTES.items():
        for stream in (False, True):
            answer = sim_server.post(path, {**content, "max_tokens": 10**6, "stream": stream})
            assert refused(answer, param="max_tokens")["code"] == "context_length_exceeded"


@pytest.mark.parametrize("value", [0, -1, "5", 5.5, True, 2**31, 2**63, 2**64, 10**400, []])
def test_invalid(sim_server: ServerProcess, value: Any) -> None:
    with unharmed(sim_server):
        refused(sim_server.post(COMPLETIONS, {"prompt": "x", "max_tokens": value}), param="max_tokens")
        for name in ("max_tokens", "max_completion_tokens"):
            error = refused(sim_server.post(CHAT, {**ROUTES[CHAT], name: value}))
            assert error["param"] in (name, "max_tokens")


def test_zero_with_echo(sim_server: ServerProcess) -> None:
    assert generated(both(sim_server, prompt="hello", max_tokens=0, echo=True)) == 0
