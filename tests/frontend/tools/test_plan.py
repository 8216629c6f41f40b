"""What requests say about tools, structure and thinking, and the grammars that come of it."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import jsonschema_rs
import llguidance
import pytest
from enginecore.errors import ParameterError
from enginecore.frontend.outputs import CompletionOutput
from enginecore.frontend.structured import GrammarChecker
from enginecore.frontend.tools.answer import PlannedAnswer
from enginecore.frontend.tools.formats import BY_NAME
from enginecore.frontend.tools.pieces import merged
from enginecore.frontend.tools.plan import Dialect, Plan, find_dialect, make_plan

from tests.frontend.toy import ToyTokenizer

BYTES = llguidance.LLTokenizer("byte")
CHECKER = GrammarChecker()
WEATHER: dict[str, Any] = {"type": "function", "function": {"name": "weather", "parameters": {
    "type": "object", "properties": {"city": {"type": "string", "maxLength": 8}, "days": {"type": "integer"}},
    "required": ["city"]}}}  # fmt: skip
NOW: dict[str, Any] = {"type": "function", "function": {"name": "now"}}
TOOLS = [WEATHER, NOW]


class Plain(ToyTokenizer):
    """All marks are ordinary text, so that a vocabulary of bytes can follow the grammars."""

    def special_token_id(self, text: str) -> int | None:
        return None


def dialect(tools: str = "none", thinking: str = "none") -> Dialect:
    return find_dialect(None, Plain(), tools, thinking)


def plan(style: str = "hermes", thinking: str = "none", **fields: Any) -> Plan:
    given: dict[str, Any] = {"tools": TOOLS, "tool_choice": None, "parallel": True, "response_format": None,
                             "structured_outputs": None, "thinking_budget": None, **fields}  # fmt: skip
    return make_plan(dialect(style, thinking), **given)


def accepts(grammar: str | None, text: str, *, whole: bool = True) -> bool:
    assert grammar is not None
    matcher = llguidance.LLMatcher(BYTES, grammar, log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    data = list(text.encode())
    return bool(matcher.try_consume_tokens(data) == len(data) and (not whole or matcher.is_accepting()))


def a_forced_answer(grammar: str) -> str:
    """Walk through the grammar, at each step by the first byte of some that it allows."""
    matcher, text = llguidance.LLMatcher(BYTES, grammar, log_level=0), b""
    for _ in range(2000):
        if matcher.is_stopped():
            break
        forced = matcher.compute_ff_bytes()
        for byte in [*forced] or [*b'}]"cw\n<,0a']:
            if matcher.validate_tokens([byte]) == 1:
                matcher.consume_token(byte)
                text += bytes([byte])
                if not forced:
                    break
        else:
            if matcher.is_accepting() and not forced:
                break
    return text.decode()


@pytest.mark.parametrize("style", sorted(BY_NAME))
@pytest.mark.parametrize("parallel", [True, False])
def test_forced_calls_are_what_the_parser_reads(style: str, parallel: bool) -> None:
    wanted = plan(style, tool_choice="required", parallel=parallel)
    form = wanted.form("...", CHECKER)
    text = a_forced_answer(str(form.grammar))
    parser = wanted.parser(opened=False)
    pieces = merged(parser.feed(text) + parser.finish())
    names = [piece.text for piece in pieces if piece.kind == "call"]
    assert names and set(names) <= {"weather", "now"} and (parallel or len(names) == 1), (text, pieces)
    assert not any(piece.text.strip() for piece in pieces if piece.kind == "text")
    schema = jsonschema_rs.validator_for(WEATHER["function"]["parameters"])
    for call, arguments in itertools.pairwise(pieces):
        if call.kind == "call":
            value = json.loads(arguments.text)
            assert schema.is_valid(value) if call.text == "weather" else value == {}
    two = text + BY_NAME[style].write_between + text
    if not parallel and not BY_NAME[style].write_last:
        assert not accepts(form.grammar, two)


def test_every_tool_schema_compiles() -> None:
    tools = json.loads((Path(__file__).parents[2] / "data" / "tool_schemas.json").read_text(encoding="utf-8"))
    assert len(tools) == 200 and len({tool["function"]["name"] for tool in tools}) == 200
    for tool in tools:
        jsonschema_rs.validator_for(tool["function"].get("parameters") or {})
    for start in range(0, 200, 25):
        form = plan(tools=tools[start : start + 25], tool_choice="required").form("", CHECKER)
        assert accepts(form.grammar, "<tool_call>", whole=False) and not accepts(form.grammar, "x", whole=False)


def test_a_named_function_is_the_only_one() -> None:
    for choice in (
        {"type": "function", "function": {"name": "now"}},
        {"type": "function", "name": "now"},
        {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [NOW]}},
    ):
        wanted = plan(tool_choice=choice)
        assert [tool["function"]["name"] for tool in wanted.choice.tools] == ["now"]
        grammar = wanted.form("", CHECKER).grammar
        assert accepts(grammar, '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>')
        assert not accepts(grammar, '<tool_call>\n{"name": "w', whole=False)


def test_auto_is_free_unless_a_tool_is_strict() -> None:
    assert plan().form("", CHECKER).grammar is None and plan(tool_choice="none").shown_tools is None
    strict = {"type": "function", "function": {**WEATHER["function"], "strict": True}}
    grammar = plan(tools=[strict, NOW]).form("", CHECKER).grammar
    call = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'
    assert accepts(grammar, "Any text <tool> {x}.") and accepts(grammar, f"Well. {call}") and accepts(grammar, call)
    assert not accepts(grammar, '<tool_call>\n{"name": "weather", "arguments": {"town', whole=False)
    assert not accepts(grammar, "<tool_call>hello", whole=False)


@pytest.mark.parametrize("style", sorted(set(BY_NAME) - {"harmony", "llama3_json", "pythonic"}))
def test_strict_calls_in_every_way_of_writing(style: str) -> None:
    """What forced calls look like is allowed after free text, and read as a call."""
    strict = {"type": "function", "function": {**NOW["function"], "strict": True}}
    wanted = plan(style, tools=[strict])
    forced = plan(style, tools=[strict], tool_choice="required", parallel=False)
    call = a_forced_answer(str(forced.form("", CHECKER).grammar))
    grammar = wanted.form("", CHECKER).grammar
    assert accepts(grammar, f"Well, {call}") and accepts(grammar, "Just text.")
    parser = wanted.parser(opened=False)
    pieces = merged(parser.feed(f"Well, {call}") + parser.finish())
    assert [(piece.kind, piece.text) for piece in pieces] == [("text", "Well,"), ("call", "now"), ("arguments", "{}")]


def test_structure_and_tools_are_alternatives_under_auto() -> None:
    wanted = plan(response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": {"const": 5}}})
    grammar = wanted.form("", CHECKER).grammar
    call = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
    assert accepts(grammar, "5") and accepts(grammar, call) and not accepts(grammar, "6", whole=False)
    assert plan(tool_choice="required", response_format={"type": "json_object"}).structure is None


@pytest.mark.parametrize("style", ["think", "mistral", "granite"])
def test_structure_begins_after_thinking(style: str) -> None:
    wanted = plan(thinking=style, tools=None, response_format={"type": "json_object"})
    thought = wanted.dialect.reasoning
    assert thought is not None
    opened = wanted.form(f"user: x\n{thought.begin}\n", CHECKER)
    assert opened.opened and accepts(opened.grammar, f"Hm {{}}, so be it.{thought.end}\n\n{{}}")
    assert not accepts(opened.grammar, f"Hm.{thought.end} no", whole=False)
    closed = wanted.form("user: x\n", CHECKER)
    assert not closed.opened and accepts(closed.grammar, "{}")
    assert accepts(closed.grammar, f"{thought.begin}a{thought.end}{{}}")
    assert not accepts(closed.grammar, "Hm.", whole=False)


def test_structure_and_calls_in_channels() -> None:
    analysis = "<|channel|>analysis<|message|>Hm {}.<|end|><|start|>assistant"
    wanted = plan("harmony", "harmony", tools=None, response_format={"type": "json_object"})
    grammar = wanted.form("<|start|>assistant", CHECKER).grammar
    final = "<|channel|>final<|message|>{}"
    assert accepts(grammar, final) and accepts(grammar, analysis + final) and not accepts(grammar, "{}", whole=False)
    pieces = merged([*wanted.parser(opened=False).feed(analysis + final)])
    assert [(piece.kind, piece.text) for piece in pieces] == [("reasoning", "Hm {}."), ("text", "{}")]
    forced = plan("harmony", "harmony", tool_choice="required").form("<|start|>assistant", CHECKER).grammar
    call = "<|channel|>commentary to=functions.now <|constrain|>json<|message|>{}"
    assert accepts(forced, call) and accepts(forced, analysis + call) and not accepts(forced, final, whole=False)


def test_special_tokens_stand_as_tokens() -> None:
    class Special(ToyTokenizer):
        def special_token_id(self, text: str) -> int | None:
            return {"[TOOL_CALLS]": 300, "[ARGS]": 301}.get(text)

    given: dict[str, Any] = {"tools": TOOLS, "tool_choice": "required", "parallel": False, "response_format": None,
                             "structured_outputs": None, "thinking_budget": None}  # fmt: skip
    wanted = make_plan(find_dialect(None, Special(), "mistral_v11", "none"), **given)
    form = wanted.form("", CHECKER)
    assert form.shown_tokens == {300, 301} and '<[300]> \\"now\\" <[301]>' in str(form.grammar)


def test_thinking_budget() -> None:
    wanted = plan(thinking="think", thinking_budget=5)
    opened = wanted.form("a<think>", CHECKER).thinking
    begun = wanted.form("a", CHECKER).thinking
    encode = ToyTokenizer().encode
    assert opened is not None and (opened.begin, opened.end, opened.budget) == ([], encode("</think>"), 5)
    assert begun is not None and begun.begin == encode("<think>")
    with pytest.raises(ParameterError, match="not known to think"):
        plan(thinking_budget=5).form("", CHECKER)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": None, "tool_choice": "required"}, "tool_choice"), ({"tool_choice": "maybe"}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "other"}}}, "tool_choice"),
        ({"tool_choice": {"type": "function"}}, "tool_choice"), ({"tool_choice": {"type": "x"}}, "tool_choice"),
        ({"tool_choice": {"type": "allowed_tools"}}, "tool_choice"), ({"tool_choice": 5}, "tool_choice"),
        ({"tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [5]}}, "tool_choice"),
        ({"tools": [NOW, NOW]}, "tools[1].function.name"), ({"tools": [NOW] * 600}, "tools"),
        ({"tools": [{"type": "function", "function": {"name": 'a"b'}}]}, "tools[0].function.name"),
        ({"tools": [{"type": "function", "function": {"name": "a", "parameters": []}}]},
         "tools[0].function.parameters"),
        ({"response_format": {"type": "xml"}}, "response_format"),
        ({"response_format": {"type": "json_schema", "json_schema": {}}}, "response_format.json_schema"),
    ],
)  # fmt: skip
def test_refused_by_name(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(ParameterError) as caught:
        plan(**fields)
    assert caught.value.param == param


def test_a_tool_that_cannot_be_followed_is_named() -> None:
    bad = {"type": "function", "function": {"name": "bad", "parameters": {"type": "object", "not": {}}}}
    with pytest.raises(ParameterError) as caught:
        plan(tools=[NOW, bad], tool_choice="required").form("", CHECKER)
    assert caught.value.param == "tools[1].function.parameters"
    assert plan(tools=[NOW, bad]).form("", CHECKER).grammar is None, "under auto nothing has to be followed"


def test_dialects() -> None:
    found = find_dialect("<tool_call> ... </think>", ToyTokenizer())
    assert found.tools is BY_NAME["hermes"] and found.reasoning is not None and found.reasoning.name == "think"
    for name in ("tools", "thinking"):
        with pytest.raises(ParameterError, match="must be one of auto, none"):
            find_dialect(None, ToyTokenizer(), **{name: "nonsense"})
    assert plan("none").plain and plan("none", tool_choice="required").style is BY_NAME["hermes"]


@pytest.mark.parametrize(
    ("text", "reason", "stop", "expected"),
    [
        ("Hi", "stop", None, "stop"),
        ('<tool_call>{"name": "now", "arguments": {}}</tool_call>', "stop", None, "tool_calls"),
        ('<tool_call>{"name": "now", "arguments": {"a', "length", None, "length"),
        ('<tool_call>{"name": "now", "arguments": {"a', "stop", "b", "stop"),
        ('<tool_call>{"name": "now", "arguments": {}}', "stop", "\n", "tool_calls"),
    ],
)  # fmt: skip
def test_why_an_answer_ended(text: str, reason: str, stop: str | None, expected: str) -> None:
    wanted = plan()
    answer = PlannedAnswer(wanted, wanted.form("", CHECKER))
    answer.feed(CompletionOutput(0, text, [], finish_reason=reason, stop_reason=stop))
    assert answer.finish_reason == expected


def test_ids_and_reasoning_that_is_not_wanted() -> None:
    wanted = plan("mistral", thinking="mistral")
    answer = PlannedAnswer(wanted, wanted.form("", CHECKER), with_reasoning=False)
    pieces = answer.feed(CompletionOutput(0, "[THINK]Hm.[/THINK]Yes.", [], finish_reason="stop"))
    assert [(piece.kind, piece.text) for piece in pieces] == [("text", "Yes.")]
    assert len(answer.call_id()) == 9 and answer.call_id().isalnum() and answer.call_id() != answer.call_id()


def test_the_checkpoints_own_template_where_no_format_is_known() -> None:
    class Own(ToyTokenizer):
        response_template = {
            "start_anchor": "assistant\n",
            "fields": {"reasoning": {"open": "{", "close": "}"}, "content": {},
                       "tool_calls": {"open": "<<", "close": ">>", "content": "json", "repeats": True}},
        }  # fmt: skip

    found = find_dialect(None, Own())
    assert found.template is not None and find_dialect("<tool_call>", Own()).template is None
    given: dict[str, Any] = {"tools": TOOLS, "tool_choice": None, "parallel": True, "response_format": None,
                             "structured_outputs": None, "thinking_budget": None}  # fmt: skip
    wanted = make_plan(found, **given)
    form = wanted.form("assistant\n{", CHECKER)
    assert form.prefix == "{" and form.shown_tokens == Own().special_token_ids and not wanted.plain
    answer = PlannedAnswer(wanted, form)
    pieces = answer.feed(CompletionOutput(0, 'Hm.} Yes <<{"name": "now"}>>', [], finish_reason="stop"))
    assert [(piece.kind, piece.text) for piece in pieces] == [
        ("reasoning", "Hm."), ("text", "Yes"), ("call", "now"), ("arguments", "{}")]  # fmt: skip
    assert answer.finish_reason == "tool_calls"
    with pytest.raises(ParameterError, match="no response template"):
        find_dialect(None, ToyTokenizer(), "template")
