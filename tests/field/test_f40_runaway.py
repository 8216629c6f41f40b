"""F40: whitespace and digits cannot run on, so that an object ends."""

from __future__ import annotations

import json
import re
from typing import Any

from tests.field.answers import user
from tests.field.support import CHAT
from tests.serving import ServerProcess

CLOSED = {"type": "object", "properties": {"name": {"type": "string", "maxLength": 10}, "n": {"type": "integer"},
          "ok": {"type": "boolean"}}, "required": ["name", "n", "ok"], "additionalProperties": False}  # fmt: skip


def ask(server: ServerProcess, form: dict[str, Any], **body: Any) -> list[dict[str, Any]]:
    body = {"messages": [user("A person as JSON.")], "temperature": 1, "seed": 1, "max_tokens": 300,
            "response_format": form, **body}  # fmt: skip
    answer = server.post(CHAT, body)
    assert answer.status_code == 200, answer.text
    choices: list[dict[str, Any]] = answer.json()["choices"]
    return choices


def schema(value: dict[str, Any]) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "x", "schema": value}}


def test_small_objects_end(server: ServerProcess) -> None:
    for choice in ask(server, schema(CLOSED), n=8):
        assert choice["finish_reason"] == "stop"
        assert set(json.loads(choice["message"]["content"])) == {"name", "n", "ok"}


def test_pushed_towards_whitespace_and_digits(server: ServerProcess) -> None:
    texts = ("\n", " ", "\n\n", "   ", "9")
    pushed = [server.post("/tokenize", {"prompt": text}).json()["tokens"][0] for text in texts]
    (choice,) = ask(server, schema(CLOSED), temperature=0, logit_bias={str(token): 100 for token in pushed})
    text = choice["message"]["content"]
    assert choice["finish_reason"] == "stop" and set(json.loads(text)) == {"name", "n", "ok"}
    outside = re.sub(r'"(?:[^"\\]|\\.)*"', '""', text)
    assert max(len(run) for run in re.findall(r"\s*", outside)) <= 13
    assert re.search(r"\s", outside), "the push was felt"


def test_json_object_is_an_object(server: ServerProcess) -> None:
    for choice in ask(server, {"type": "json_object"}, n=4, max_tokens=40):
        text = choice["message"]["content"]
        assert text.startswith("{")
        if choice["finish_reason"] == "stop":
            assert isinstance(json.loads(text), dict)
