"""The same request plainly and as a stream, and reading an answer that is either."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from tests.field.support import CHAT, COMPLETIONS, together
from tests.server.checkers import (
    check_chat,
    check_chat_stream,
    check_completion,
    check_completion_stream,
    same_answer,
    strict_json,
)
from tests.serving import MODEL_NAME, ServerProcess

#: Log-probabilities of one position differ this much, at most, when it is computed in batches of other sizes.
ROUNDING = 1e-3


def both(server: ServerProcess, path: str = COMPLETIONS, choices: int = 1, **body: Any) -> dict[str, Any]:
    """The plain answer, after the same request as a stream gave the same text, log-probabilities, finish and usage.

    `choices` is how many there must be in all. Both requests run at the same time.
    """
    body = {"model": MODEL_NAME, **body}
    streamed = {**body, "stream": True, "stream_options": {"include_usage": True}}
    plain, stream = together([lambda: server.post(path, body), lambda: server.post(path, streamed)])
    assert (plain.status_code, stream.status_code) == (200, 200), (plain.text, stream.text)
    assert stream.headers["content-type"].startswith("text/event-stream")
    if path == CHAT:
        answer = check_chat(strict_json(plain.content), choices)
        other = check_chat_stream(stream.text, choices, usage=True)
    else:
        echo = bool(body.get("echo"))
        answer = check_completion(strict_json(plain.content), choices, echo=echo)
        other = check_completion_stream(stream.text, choices, usage=True, echo=echo)
    same_answer(_settled(other, answer), answer)
    return answer


def _settled(value: Any, other: Any) -> Any:
    """`value` with the numbers of `other` where they are as good as equal."""
    if isinstance(value, dict) and isinstance(other, dict):
        return {key: _settled(each, other.get(key)) for key, each in value.items()}
    if isinstance(value, list) and isinstance(other, list) and len(value) == len(other):
        return [_settled(*pair) for pair in zip(value, other, strict=True)]
    if isinstance(value, float) and isinstance(other, float) and value == pytest.approx(other, abs=ROUNDING):
        return other
    return value


def texts(answer: dict[str, Any]) -> list[str]:
    """The text of each choice, of either route."""
    return [choice["text"] if "text" in choice else choice["message"]["content"] for choice in answer["choices"]]


def text(answer: dict[str, Any]) -> str:
    (only,) = texts(answer)
    return only


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


def tokens_of(server: ServerProcess, prompt: str, **options: Any) -> list[int]:
    """Token ids of a text."""
    answer = server.post("/tokenize", {"prompt": prompt, "add_special_tokens": False, **options})
    ids: list[int] = answer.json()["tokens"]
    return ids


def rendered(server: ServerProcess, messages: Sequence[dict[str, Any]], **options: Any) -> list[int]:
    """Token ids of a conversation."""
    answer = server.post("/tokenize", {"messages": list(messages), **options})
    assert answer.status_code == 200, answer.text
    ids: list[int] = answer.json()["tokens"]
    return ids
