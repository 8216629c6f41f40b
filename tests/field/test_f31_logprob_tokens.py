"""F31: `bytes` are the token's own bytes, and joined they are the content."""

from __future__ import annotations

from typing import Any

from tests.field.answers import both, text, tokens_of, user
from tests.field.support import CHAT
from tests.serving import ServerProcess

BODY: dict[str, Any] = {"temperature": 0, "logprobs": True, "top_logprobs": 5}


def content_of(answer: dict[str, Any]) -> list[dict[str, Any]]:
    entries: list[dict[str, Any]] = answer["choices"][0]["logprobs"]["content"]
    return entries


def test_bytes_are_the_content(server: ServerProcess) -> None:
    answer = both(server, CHAT, messages=[user("Repeat exactly: 😀 🎉 日本")], max_tokens=16, **BODY)
    entries = content_of(answer)
    raw = b"".join(bytes(entry["bytes"]) for entry in entries)
    assert raw.decode("utf-8", "replace") == text(answer) and not text(answer).isascii()
    assert any(entry["token"] == "\ufffd" and entry["bytes"] for entry in entries), "parts of characters have bytes"
    for entry in entries:
        if entry["token"].isascii():
            assert entry["token"].encode() == bytes(entry["bytes"])
        assert len(entry["top_logprobs"]) == 5


def test_the_chosen_token_is_there_though_it_is_not_among_the_best(server: ServerProcess) -> None:
    emoji = tokens_of(server, "😀")
    answer = both(server, CHAT, messages=[user("Hello")], max_tokens=3, allowed_token_ids=emoji, **BODY)
    first = content_of(answer)[0]
    assert text(answer) == "😀" and first["bytes"] == [0xF0, 0x9F]
    best = first["top_logprobs"]
    assert first["logprob"] < best[-1]["logprob"] and first["bytes"] not in [each["bytes"] for each in best]


def test_special_tokens_can_be_told(server: ServerProcess) -> None:
    answer = both(server, CHAT, messages=[user("What is the capital of France?")], max_tokens=20, **BODY)
    last = content_of(answer)[-1]
    assert answer["choices"][0]["finish_reason"] == "stop"
    assert last["token"] == "<|im_end|>" and last["bytes"] == [], "it adds nothing to the content"
    assert last["top_logprobs"][0]["token"] == "<|im_end|>"
    assert "<|im_end|>" not in text(answer)
