"""A strict checker of /v1/responses: the plain answer and the sequence of a stream's events."""

from __future__ import annotations

import copy
from typing import Any

from tests.server.message_checker import parse_named_events

ENDS = ("completed", "incomplete", "failed")
_PART_EVENT = {"output_text": "output_text", "reasoning_text": "reasoning_text"}


def check_response(answer: dict[str, Any]) -> dict[str, Any]:
    assert answer["object"] == "response" and answer["id"].startswith("resp_") and answer["status"] in ENDS
    assert (answer["incomplete_details"] is not None) == (answer["status"] == "incomplete")
    usage = answer["usage"]
    assert usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"]
    assert 0 <= usage["input_tokens_details"]["cached_tokens"] <= usage["input_tokens"]
    for item in answer["output"]:
        assert item["status"] in ("completed", "incomplete")
        if item["type"] == "function_call":
            assert item["id"].startswith("fc_") and item["call_id"].startswith("call_")
    return answer


def check_response_stream(text: str) -> dict[str, Any]:
    """The response that the last event holds, after checking that the events before add up to it."""
    events = parse_named_events(text)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    kinds = [event["type"].removeprefix("response.") for event in events]
    assert kinds[0] == "created" and kinds[-1] in ENDS and not set(kinds[:-1]) & set(ENDS)
    assert "in_progress" in kinds[1:3]
    output: list[dict[str, Any]] = []
    item: dict[str, Any] | None = None
    for kind, event in zip(kinds, events, strict=True):
        if "output_index" in event:
            assert event["output_index"] == len(output)
        if kind == "output_item.added":
            assert item is None and event["item"]["status"] == "in_progress"
            item = copy.deepcopy(event["item"])
        elif kind == "output_item.done":
            assert item is not None
            output.append({**item, "status": event["item"]["status"]})
            assert output[-1] == event["item"], "what was added up is what is done"
            item = None
        elif "item_id" in event:
            assert item is not None and event["item_id"] == item["id"]
            _grow(item, kind, event)
    assert item is None
    last: dict[str, Any] = events[-1]["response"]
    assert last["output"] == output and last["id"] == events[0]["response"]["id"]
    return check_response(last)


def _grow(item: dict[str, Any], kind: str, event: dict[str, Any]) -> None:
    if kind == "content_part.added":
        assert event["content_index"] == len(item["content"]) and not event["part"]["text"]
        item["content"].append(copy.deepcopy(event["part"]))
    elif kind == "content_part.done":
        assert item["content"][-1] == event["part"]
    elif kind == "function_call_arguments.delta":
        item["arguments"] += event["delta"]
    elif kind == "function_call_arguments.done":
        assert item["arguments"] == event["arguments"] and event["name"] == item["name"]
    elif kind.endswith("_text.delta"):
        part = item["content"][event["content_index"]]
        assert kind == f"{part['type']}.delta"
        part["text"] += event["delta"]
        if part["type"] == "output_text":
            part["logprobs"] += event["logprobs"]
    else:
        part = item["content"][event["content_index"]]
        assert kind == f"{part['type']}.done" and event["text"] == part["text"]
        assert event.get("logprobs", []) == part.get("logprobs", [])


def same_response(left: dict[str, Any], right: dict[str, Any]) -> None:
    """Equal but for ids and times."""

    def bare(answer: dict[str, Any]) -> dict[str, Any]:
        answer = copy.deepcopy(answer)
        for name in ("id", "created_at", "completed_at"):
            answer.pop(name)
        for item in answer["output"]:
            item.pop("id"), item.pop("call_id", None)
        return answer

    assert bare(left) == bare(right)
