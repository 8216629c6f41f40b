"""What an answer must look like: bad specifications are refused by name, good ones accept exactly what they say."""

from __future__ import annotations

import datetime
import json
import re
from decimal import Decimal
from typing import Any

import jsonschema_rs
import llguidance
import pytest
from enginecore.constraints import StructuredOutputsParams, structured_outputs_of
from enginecore.errors import ParameterError
from enginecore.frontend.structured import COMPACT, GrammarChecker, grammar_of, json_grammar
from enginecore.frontend.structured_schema import FORMATS, closed, prepared
from hypothesis import given, settings
from hypothesis import strategies as st

BYTES = llguidance.LLTokenizer("byte")
CHECKER = GrammarChecker()
NESTED: dict[str, Any] = {"type": "string"}
for _ in range(200):
    NESTED = {"type": "object", "properties": {"a": NESTED}}


def accepts(grammar: str, text: str) -> bool:
    matcher = llguidance.LLMatcher(BYTES, grammar, log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    data = list(text.encode())
    return bool(matcher.try_consume_tokens(data) == len(data) and matcher.is_accepting())


def fits(schema: Any, text: str, **options: Any) -> bool:
    return accepts(grammar_of(StructuredOutputsParams(json=schema, **options), CHECKER), text)


BAD: list[tuple[dict[str, Any], str]] = [
    *[({"regex": regex}, "regex") for regex in ("(", "[", "*a", "a{2,1}", "(?<=x)y", r"\bfoo\b", "", "(" * 5000)],
    *[({"json": schema}, "json") for schema in (
        "", "{", 5, "5", [], {"type": "nope"}, {"$ref": "#/$defs/missing"}, {"$ref": "#"}, {"enum": []}, False,
        {"not": {}}, {"if": {}}, {"uniqueItems": True, "type": "array"},
        {"type": "string", "minLength": 3, "maxLength": 2},
        {"enum": [f"value {i}" for i in range(100_000)]}, NESTED, "[" * 5000)],
    ({"choice": []}, "choice"), ({"choice": [""]}, "choice"), ({"choice": [1]}, "choice"), ({"choice": "a"}, "choice"),
    *[({"grammar": grammar}, "grammar") for grammar in ("", "  ", "start: nothing", ")))", "%import common.WORD")],
    ({"json_object": False}, "json_object"), ({"json_object": "yes"}, "json_object"),
    *[({"structural_tag": tag}, "structural_tag") for tag in (
        {}, "x", {"structures": [], "triggers": ["a"]},
        {"format": {"type": "sequence"}})],
    ({"regex": "a", "choice": ["b"]}, ""), ({}, ""), ({"jsn": {}}, "jsn"),
]  # fmt: skip


@pytest.mark.parametrize(("wanted", "field"), BAD, ids=[f"{field}-{i}" for i, (_, field) in enumerate(BAD)])
def test_refused_by_name(wanted: dict[str, Any], field: str) -> None:
    with pytest.raises(ParameterError) as caught:
        grammar_of(structured_outputs_of(wanted), CHECKER)
    where = f"structured_outputs.{field}" if field else "structured_outputs"
    assert str(caught.value.param).startswith(where) and len(str(caught.value)) < 900
    assert "Traceback" not in str(caught.value) and "<state>" not in str(caught.value)


def test_tags_name_what_is_wrong() -> None:
    for structure, where in (
        ({"begin": "<a>", "end": 5}, "structures[0]"), ({"begin": "b", "schema": {}, "end": ""}, "structures[0]"),
        ({"begin": "<a>", "schema": {"type": "nope"}, "end": ""}, ""),
        ({"begin": "<a>", "schema": 5, "end": ""}, "structures[0].schema"),
    ):  # fmt: skip
        tag = StructuredOutputsParams(structural_tag={"structures": [structure], "triggers": ["<a"]})
        with pytest.raises(ParameterError) as caught:
            grammar_of(tag, CHECKER)
        assert str(caught.value.param).startswith(f"structured_outputs.structural_tag{'.' if where else ''}{where}")


def test_outcomes_are_remembered_by_content() -> None:
    checker = GrammarChecker()
    for _ in range(3):
        grammar_of(StructuredOutputsParams(regex="[a-z]+"), checker)
        with pytest.raises(ParameterError):
            grammar_of(StructuredOutputsParams(regex="[a-z"), checker)
    assert checker.compiled == 2


@pytest.mark.parametrize("regex", ["(a{1000}){1000}", "((a|b|c){1,300}x){1,300}", "(" * 90 + "a" + "+)" * 90])
def test_what_looks_like_a_bomb_is_none(regex: str) -> None:
    """Derivatives are made as they are needed, so a large count costs little (and `LIMITS` bounds what it may)."""
    assert not accepts(grammar_of(StructuredOutputsParams(regex=regex), CHECKER), "b")


OBJECT = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}


@pytest.mark.parametrize(
    ("text", "right"),
    [
        ('{"a":1}', True), ('{ "a" : 1 }', True), ('{\n    "a": 1\n}', True), ('{"a":  1}', False),
        ('{\n\n"a": 1}', False), ('{"a": 1}\n', False), ('{"a": 1.5}', False), ("{}", False), ('{"a":1,"b":2}', False),
        ('{"a":' + "9" * 18 + "}", True), ('{"a":' + "9" * 19 + "}", False), ("{\n" + " " * 12 + '"a":1}', True),
        ("{\n" + " " * 13 + '"a":1}', False),
    ],
)  # fmt: skip
def test_whitespace_and_digits_are_bounded(text: str, right: bool) -> None:
    assert fits(OBJECT, text) is right


def test_whitespace_can_be_chosen() -> None:
    assert fits(OBJECT, '{"a":1}', disable_any_whitespace=True)
    assert not fits(OBJECT, '{"a": 1}', disable_any_whitespace=True)
    assert fits(OBJECT, '{\t"a":\t1}', whitespace_pattern="\\t")
    with pytest.raises(ParameterError):
        StructuredOutputsParams(json={}, whitespace_pattern="x", disable_any_whitespace=True)
    compact = json_grammar(OBJECT, "x", whitespace=COMPACT)
    assert accepts(compact, '{"a": 1}') and not accepts(compact, '{"a":1}')


@pytest.mark.parametrize(
    ("schema", "right", "wrong"),
    [
        ({"$defs": {"x": {"const": 5}}, "$ref": "#/$defs/x"}, "5", "6"),
        ({"$ref": "#/definitions/x", "definitions": {"x": {"enum": ["a", None]}}}, "null", "0"),
        ({"allOf": [{"type": "integer", "minimum": 5}, {"maximum": 6}]}, "6", "7"),
        ({"anyOf": [{"type": "null"}, {"type": "string", "maxLength": 2}]}, '"ab"', '"abc"'),
        ({"type": "string", "nullable": True}, '"a"', "null"),
        ({"type": "string", "format": "int32"}, '"anything"', "1"),
        ({"type": "string", "pattern": "^[ab]$"}, '"a"', '"c"'),
        ({"enum": ["é\n\"\\"]}, json.dumps('é\n"\\', ensure_ascii=False), '"e"'),
        ({"type": "array", "prefixItems": [{"const": 1}], "items": False}, "[1]", "[1,2]"),
        ({"type": "number", "minimum": 0, "maximum": 1}, "0.123456789", "0.1234567891"),
        ({"type": "number", "exclusiveMinimum": 0, "maximum": 0.000001}, "0.0000001", "0"),
        ({"type": "number", "exclusiveMinimum": 0, "maximum": 0.5}, "0.5", "0"),
        ({"type": "number", "minimum": 0, "maximum": 1e-20}, "0", "1"),
        ({"type": "number"}, "6.02e23", "x"),
        (True, '{"x":[1,"a",null]}', "{"),
        ('{"type": "boolean"}', "true", "True"),
    ],
)  # fmt: skip
def test_schemas(schema: Any, right: str, wrong: str) -> None:
    assert fits(schema, right) and not fits(schema, wrong)


DECIMALS = st.decimals(-3, 3, places=2).map(float)
BOUNDS = st.one_of(st.none(), st.integers(-12, 12), DECIMALS, st.sampled_from([0.0, 1e-6]))


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(["number", "integer"]), *[BOUNDS] * 4)
def test_no_number_beyond_its_bounds(kind: str, low: Any, above: Any, high: Any, below: Any) -> None:
    """Whatever the bounds, what a grammar accepts is valid: at the bounds, beside them, and in other spellings."""
    schema = {"type": kind, "minimum": low, "exclusiveMinimum": above, "maximum": high, "exclusiveMaximum": below}
    schema = {name: value for name, value in schema.items() if value is not None}
    try:
        grammar = grammar_of(StructuredOutputsParams(json=schema), CHECKER)
    except ParameterError:
        return
    judge = jsonschema_rs.validator_for(schema)
    bounds = [value for value in (low, above, high, below) if value is not None]
    for value in (0.0, 0.5, *(bound + beside for bound in bounds for beside in (0, 1, -1, 0.1, -1e-9, 1e-9))):
        short = format(Decimal(repr(float(value))), "f")
        for text in {short, short.rstrip("0").rstrip(".") if "." in short else short, short + "0", f"{value:.2f}"}:
            assert not accepts(grammar, text) or judge.is_valid(json.loads(text)), (schema, text)


def test_json_object_is_an_object() -> None:
    grammar = grammar_of(StructuredOutputsParams(json_object=True), CHECKER)
    assert accepts(grammar, '{"a": [1]}') and not accepts(grammar, "[1]") and not accepts(grammar, '"a"')


def test_choices_and_regexes_are_whole_answers() -> None:
    choice = grammar_of(StructuredOutputsParams(choice=["ja", 'a"b\\', "日本"]), CHECKER)
    assert all(accepts(choice, text) for text in ("ja", 'a"b\\', "日本")) and not accepts(choice, "jaja")
    regex = grammar_of(StructuredOutputsParams(regex="^(yes|no)$"), CHECKER)
    assert accepts(regex, "no") and not accepts(regex, "nope")


def test_tags_in_both_notations() -> None:
    schema = {"type": "object", "properties": {"x": {"type": "boolean"}}, "required": ["x"]}
    old = {"type": "structural_tag", "structures": [{"begin": "<f=a>", "schema": schema, "end": "</f>"}],
           "triggers": ["<f="]}  # fmt: skip
    new = {"type": "structural_tag", "format": {"type": "triggered_tags", "triggers": ["<f="], "tags": [
        {"begin": "<f=a>", "content": {"type": "json_schema", "json_schema": schema}, "end": "</f>"}]}}  # fmt: skip
    for tag in (old, new, json.dumps(old)):
        grammar = grammar_of(StructuredOutputsParams(structural_tag=tag), CHECKER)
        assert accepts(grammar, "text <f> more") and accepts(grammar, 'a <f=a>{"x": true}</f> b <f=a>{"x":false}</f>')
        assert not accepts(grammar, "<f=b>") and not accepts(grammar, '<f=a>{"x": 1}</f>')


# ---- schemas ---------------------------------------------------------------------------------------------------------


def test_patterns_of_formats_follow_the_calendar() -> None:
    day, pattern = datetime.date(1999, 12, 25), str(FORMATS["date"])
    for _ in range(1600):
        assert re.fullmatch(pattern, day.isoformat())
        day += datetime.timedelta(1)
    for wrong in ("2023-02-29", "1900-02-29", "2024-02-30", "2024-04-31", "2024-13-01", "2024-00-10", "2024-1-1"):
        assert not re.fullmatch(pattern, wrong), wrong
    assert re.fullmatch(pattern, "2000-02-29")
    assert re.fullmatch(str(FORMATS["date-time"]), "2024-02-29T23:59:59.5+01:30")
    assert re.fullmatch(str(FORMATS["uri"]), "https://a.example.com:80/x/y?z=1#q")
    assert re.fullmatch(str(FORMATS["email"]), "jo.doe+x@mail.example.com")


def test_preparing_leaves_the_schema_alone_that_it_was_given() -> None:
    members = {"a": {"type": "integer", "format": "int64"}, "format": {"type": "string"}}
    schema = {"type": "object", "properties": members,
              "$defs": {"x": {"type": ["integer", "null"]}}}  # fmt: skip
    before = json.dumps(schema)
    ready = prepared(schema)
    assert json.dumps(schema) == before and "format" not in ready["properties"]["a"]
    assert ready["properties"]["format"] == {"type": "string"} and ready["$defs"]["x"]["maximum"] == 10**18 - 1


def test_closing_schemas_of_tools() -> None:
    member = {"type": "object", "properties": {"x": {"type": "null"}}}
    shut = closed({"type": "object", "properties": {"a": member, "b": {"type": "array", "items": member}}})
    assert shut["additionalProperties"] is False and shut["properties"]["a"]["additionalProperties"] is False
    assert shut["properties"]["b"]["items"]["additionalProperties"] is False
    for open_ended in (
        {"type": "object"},
        {"type": "object", "properties": {"a": {}}, "required": ["b"]},
        {"type": "object", "properties": {"a": {}}, "additionalProperties": True},
        {"allOf": [member, {"type": "object", "properties": {"y": {}}}]},
        {**member, "anyOf": [{"required": ["x"]}]},
    ):
        assert closed(open_ended) == open_ended
