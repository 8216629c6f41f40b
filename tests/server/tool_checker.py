"""A strict reader of chat streams with calls and reasoning in them: it puts the message together again."""

from __future__ import annotations

from typing import Any

from tests.server.checkers import parse_events


def read_stream(text: str, n: int = 1) -> list[dict[str, Any]]:
    """The choices as a plain answer has them, ids of calls left out. Every rule of the deltas is asserted."""
    choices: dict[int, dict[str, Any]] = {}
    ids: list[str] = []
    for event in parse_events(text):
        for choice in event["choices"]:
            known = choices.get(choice["index"])
            delta = choice["delta"]
            if known is None:
                assert delta["role"] == "assistant", "the first chunk of a choice has its role"
                known = choices[choice["index"]] = {"content": None, "calls": [], "finish_reason": None}
            assert known["finish_reason"] is None, "a chunk after the finish"
            _add(known, delta, ids)
            if choice["finish_reason"] is not None:
                known["finish_reason"] = choice["finish_reason"]
    assert sorted(choices) == list(range(n)) and len(set(ids)) == len(ids), "ids are unique"
    for known in choices.values():
        assert known["finish_reason"] is not None
        known["content"] = known["content"] or None
    return [choices[index] for index in range(n)]


def _add(known: dict[str, Any], delta: dict[str, Any], ids: list[str]) -> None:
    kinds = [name for name in ("content", "reasoning", "tool_calls") if delta.get(name)]
    assert len(kinds) <= 1, f"content and calls are mixed up: {delta}"
    assert delta.get("reasoning") == delta.get("reasoning_content")
    for name in ("content", "reasoning"):
        if delta.get(name) is not None:
            known[name] = (known.get(name) or "") + delta[name]
    for call in delta.get("tool_calls", []):
        if "id" in call:
            assert set(call) == {"index", "id", "type", "function"} and call["type"] == "function"
            assert call["index"] == len(known["calls"]) and call["id"]
            assert set(call["function"]) == {"name", "arguments"} and call["function"]["name"]
            assert call["function"]["arguments"] == ""
            ids.append(call["id"])
            known["calls"].append([call["function"]["name"], ""])
        else:
            assert set(call) == {"index", "function"} and set(call["function"]) == {"arguments"}
            assert call["index"] == len(known["calls"]) - 1 and isinstance(call["function"]["arguments"], str)
            known["calls"][-1][1] += call["function"]["arguments"]


def read_plain(answer: dict[str, Any]) -> list[dict[str, Any]]:
    """The choices of a plain answer in the same shape."""
    choices = []
    for choice in answer["choices"]:
        message = choice["message"]
        assert message["role"] == "assistant" and message.get("reasoning") == message.get("reasoning_content")
        calls = message.get("tool_calls")
        assert calls is None or (calls and all(call["type"] == "function" and call["id"] for call in calls))
        assert calls or isinstance(message["content"], str), "content is text where there are no calls"
        known = {"content": message["content"] or None, "finish_reason": choice["finish_reason"], "calls": [
            [call["function"]["name"], call["function"]["arguments"]] for call in calls or []]}  # fmt: skip
        if "reasoning" in message:
            known["reasoning"] = message["reasoning"]
        choices.append(known)
    return choices
