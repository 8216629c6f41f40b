"""F39: a schema's keywords hold, whatever they are; one that cannot be enforced is a 400 and never ignored."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema_rs
import pytest

from tests.field.answers import user
from tests.field.support import CHAT, COMPLETIONS, refused, together
from tests.serving import ServerProcess

TOOLS = json.loads((Path(__file__).parents[1] / "data" / "tool_schemas.json").read_text(encoding="utf-8"))
#: Those of the set that show keywords, and end soon.
NAMES = ("pydantic_optional", "type_lists", "nullable_openapi", "openapi_formats", "union_of_strings", "tagged_union",
         "const_values", "mixed_enum", "unicode_names", "quotes_in_enum", "tuple", "old_definitions",
         "exclusive_bounds", "multiples", "fixed_length", "alternation_pattern")  # fmt: skip
SAMPLE = [tool["function"] for tool in TOOLS if tool["function"]["name"] in NAMES]


def test_a_weak_model_at_temperature_one_keeps_to_them(server: ServerProcess) -> None:
    def ask(function: dict[str, Any]) -> dict[str, Any]:
        form = {"type": "json_schema", "json_schema": {"name": "x", "schema": function["parameters"]}}
        body = {"prompt": f"{function['description']}, as JSON:\n", "temperature": 1, "seed": 3, "max_tokens": 60,
                "response_format": form}  # fmt: skip
        answer = server.post(COMPLETIONS, body)
        assert answer.status_code == 200, (function, answer.text)
        choice: dict[str, Any] = answer.json()["choices"][0]
        return choice

    choices = together([lambda function=function: ask(function) for function in SAMPLE])  # type: ignore[misc]
    complete = 0
    for function, choice in zip(SAMPLE, choices, strict=True):
        if choice["finish_reason"] == "stop":
            complete += 1
            value = json.loads(choice["text"])
            jsonschema_rs.validator_for(function["parameters"], validate_formats=True).validate(value)
    assert len(SAMPLE) == len(NAMES) and complete >= 6, "the test bites"


@pytest.mark.parametrize("keyword", [
    {"not": {"type": "string"}}, {"if": {}, "then": {}}, {"uniqueItems": True}, {"contains": {}},
    {"propertyNames": {"pattern": "^a"}}, {"dependentRequired": {"a": ["b"]}}, {"unevaluatedProperties": False},
    {"minContains": 1},
])  # fmt: skip
def test_what_cannot_be_enforced_is_refused(sim_server: ServerProcess, keyword: dict[str, Any]) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object", **keyword}}}
    error = refused(sim_server.post(CHAT, {"messages": [user("x")], "response_format": form}))
    assert next(iter(keyword)) in error["message"]
