"""A strict checker of /v1/messages: the plain answer and the order of a stream's events."""

from __future__ import annotations

from typing import Any

from tests.server.checkers import strict_json

STOP_REASONS = {"end_turn", "max_tokens", "stop_sequence", "tool_use", "model_context_window_exceeded"}


def parse_named_events(text: str) -> list[dict[str, Any]]:
    """The events; each has a name, which is also the type of its data. There is no [DONE]."""
    assert text.endswith("\n\n") and "[DONE]" not in text
    events = []
    for block in text[:-2].split("\n\n"):
        name, _, data = block.partition("\n")
        event = strict_json(data.removeprefix("data: "))
        assert name == f"event: {event['type']}", block
        events.append(event)
    return events


def check_message(answer: dict[str, Any]) -> dict[str, Any]:
    assert answer["type"] == "message" and answer["role"] == "assistant" and answer["id"].startswith("msg_")
    assert answer["stop_reason"] in STOP_REASONS
    assert (answer["stop_sequence"] is not None) == (answer["stop_reason"] == "stop_sequence")
    for block in answer["content"]:
        if block["type"] == "text":
            assert block["text"], "there is no empty text block"
        elif block["type"] == "tool_use":
            assert isinstance(block["input"], dict) and block["id"].startswith("toolu_") and block["name"]
        else:
            assert block["type"] == "thinking" and block["thinking"] and isinstance(block["signature"], str)
    for earlier, later in zip(answer["content"], answer["content"][1:], strict=False):
        assert (earlier["type"], later["type"]) != ("text", "text"), "texts that follow each other are one block"
    for name in ("input_tokens", "output_tokens", "cache_creation_input_tokens", "cache_read_input_tokens"):
        assert answer["usage"][name] >= 0
    return answer


def check_message_stream(text: str) -> dict[str, Any]:
    """The message that a stream's events add up to, in the shape of the plain answer."""
    events = [event for event in parse_named_events(text) if event["type"] != "ping"]
    start, *middle, delta, stop = events
    assert (start["type"], delta["type"], stop["type"]) == ("message_start", "message_delta", "message_stop")
    message: dict[str, Any] = start["message"]
    assert message["content"] == [] and message["stop_reason"] is None and message["stop_sequence"] is None
    open_block: dict[str, Any] | None = None
    fragments = ""
    for event in middle:
        assert event["index"] == len(message["content"])
        if event["type"] == "content_block_start":
            assert open_block is None
            open_block, fragments = event["content_block"], ""
        elif event["type"] == "content_block_delta":
            assert open_block is not None
            kind = event["delta"]["type"]
            if kind == "text_delta":
                assert event["delta"]["text"]
                open_block["text"] += event["delta"]["text"]
            elif kind == "thinking_delta":
                open_block["thinking"] += event["delta"]["thinking"]
            else:
                assert kind == "input_json_delta"
                fragments += event["delta"]["partial_json"]
        else:
            assert event["type"] == "content_block_stop" and open_block is not None
            if open_block["type"] == "tool_use" and fragments:
                open_block["input"] = strict_json(fragments)
            message["content"].append(open_block)
            open_block = None
    assert open_block is None, "the last block was closed"
    message |= delta["delta"]
    message["usage"] |= delta["usage"]
    return check_message(message)
