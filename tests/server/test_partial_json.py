from __future__ import annotations

import json
from typing import Any

import pytest
from enginecore.server.partial_json import arguments_object, complete

DOCUMENT: dict[str, Any] = {"a": 'x"y\\', "b": [1, 2, {"c": None, "d": "😀é\n"}], "e": -1.5e3, "f": {}, "h": True}


@pytest.mark.parametrize("ascii_only", [True, False])
def test_every_prefix_is_made_whole(ascii_only: bool) -> None:
    text = json.dumps(DOCUMENT, ensure_ascii=ascii_only)
    for end in range(1, len(text) + 1):
        assert arguments_object(text[:end]) == json.loads(complete(text[:end])), text[:end]
    assert arguments_object(text) == DOCUMENT
    assert arguments_object('{"a": "x\\"y\\\\", "b": [1, 2') == {"a": 'x"y\\', "b": [1]}, "the 2 may go on"


@pytest.mark.parametrize("text", ["", "no", "[1", '"', "}", "1", '{"a":"\\ud800"}', "[" * 100_000, '{"a":' * 9999])
def test_what_is_no_object_is_empty(text: str) -> None:
    assert arguments_object(text) == {} or "a" in arguments_object(text)
