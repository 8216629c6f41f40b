"""F07: a bad specification of the answer is a 400 that names the problem; the engine and a stream that runs go on."""

from __future__ import annotations

import json
from typing import Any

import jsonschema_rs
import pytest

from tests.field.answers import user
from tests.field.support import CHAT, COMPLETIONS, InFlight, Solo, refused, unharmed
from tests.serving import ServerProcess

WHERE = "structured_outputs"
DEEP: dict[str, Any] = {}
for _ in range(110):
    DEEP = {"type": "array", "items": DEEP}

BAD: list[tuple[dict[str, Any], str]] = [
    *[({"regex": regex}, f"{WHERE}.regex") for regex in ("(", "[", "*a", "a{2,1}", "(?<=x)y", "(" * 3000)],
    *[({"json": schema}, f"{WHERE}.json") for schema in (
        "", {"type": "nope"}, {"$ref": "#/$defs/missing"}, {"$ref": "#"}, {"enum": []}, [], DEEP,
        {"enum": [f"entry {i}" for i in range(100_000)]}, {"type": "object", "minProperties": 3, "not": {}})],
    ({"choice": []}, f"{WHERE}.choice"), ({"choice": [""]}, f"{WHERE}.choice"),
    ({"json_object": False}, f"{WHERE}.json_object"), ({"regex": "a", "choice": ["a"]}, WHERE), ({}, WHERE),
    ({"grammar": "start: nowhere"}, f"{WHERE}.grammar"),
]  # fmt: skip


def test_each_is_refused_and_a_stream_is_unaffected(server: ServerProcess, solo: Solo) -> None:
    want = solo.text("Once upon a time", 60)
    long = {"prompt": "Once upon a time", "max_tokens": 60, "temperature": 0}
    with unharmed(server), InFlight([lambda: server.complete(**long)]) as flight:
        for wanted, param in BAD:
            error = refused(server.post(COMPLETIONS, {"prompt": "x", WHERE: wanted}), param=param)
            assert error["message"].strip()
        for schema in ({"type": "nope"}, {"$ref": "#"}):
            form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
            refused(server.post(CHAT, {"messages": [user("x")], "response_format": form}))
    assert flight.results[0]["choices"][0]["text"] == want


@pytest.mark.parametrize("wanted", [
    {"regex": "^(|.*)$"}, {"regex": "^(|.*)$"}, {"json": {"type": "integer", "maximum": 20_000_000_000}},
    {"json": {"type": "array", "items": {"type": "boolean"}, "maxItems": 2}},
])  # fmt: skip
def test_what_is_legal_is_well_formed(server: ServerProcess, wanted: dict[str, Any]) -> None:
    body = {"prompt": "One:", "max_tokens": 30, "temperature": 0, WHERE: wanted}
    choice = server.post(COMPLETIONS, body).json()["choices"][0]
    if "json" in wanted and choice["finish_reason"] == "stop":
        jsonschema_rs.validate(wanted["json"], json.loads(choice["text"]))
    assert "json" in wanted or "\n" not in choice["text"]


def test_a_length_that_nothing_reaches_is_cut(server: ServerProcess) -> None:
    body = {"prompt": "x", "max_tokens": 8, "temperature": 0, WHERE: {"json": {"type": "string", "minLength": 10**9}}}
    choice = server.post(COMPLETIONS, body).json()["choices"][0]
    assert choice["finish_reason"] == "length" and choice["text"].startswith('"')
