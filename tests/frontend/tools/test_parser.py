"""Answers of every family, taken apart: the right pieces, and the same ones however the text is cut."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest
from enginecore.frontend.reasoning import BY_NAME as REASONING
from enginecore.frontend.reasoning import ReasoningParser, TextParser, is_open
from enginecore.frontend.tools.formats import BY_NAME, find_format, format_of_template
from enginecore.frontend.tools.harmony import HarmonyParser
from enginecore.frontend.tools.parser import ToolParser
from enginecore.frontend.tools.pieces import AnswerParser, merged
from hypothesis import given, settings
from hypothesis import strategies as st

NASTY = {"city": 'Łódź "quoted" \\ {braces} 😀\n日本', "days": 2, "deep": {"a": [1, {"b": "]}"}]}}
ARGS, NONE = json.dumps(NASTY, ensure_ascii=False), "{}"
TOOLS: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {
        "city": {"type": "string"}, "days": {"type": "integer"}, "deep": {"type": "object"}}}}},
    {"type": "function", "function": {"name": "now"}},
]  # fmt: skip
#: "text", then each call as [name, arguments].
Expected = tuple[str, list[tuple[str, str]]]
ONE, TWO = [("weather", ARGS)], [("weather", ARGS), ("now", NONE)]
CALL = '{"name": "weather", "arguments": ' + ARGS + "}"
NOW = '{"name": "now", "arguments": {}}'
PYTHONIC = f"weather(city={NASTY['city']!r}, days=2, deep={NASTY['deep']!r})"

CASES: list[tuple[str, str, Expected]] = [
    ("hermes", "Hello, <b>you</b> & {you}.\n", ("Hello, <b>you</b> & {you}.\n", [])),
    ("hermes", f"Let me see.\n<tool_call>\n{CALL}\n</tool_call>", ("Let me see.", ONE)),
    ("hermes", f"<tool_call>\n{CALL}\n</tool_call>\n<tool_call>{NOW}</tool_call>\n", ("", TWO)),
    ("hermes", f'<tool_call>{{"arguments": {ARGS}, "name": "weather"}}</tool_call> Done.', (" Done.", ONE)),
    ("hermes", "<tool_call>\nhello</tool_call> there", ("<tool_call>\nhello</tool_call> there", [])),
    ("hermes", '<tool_call>{"nom": [1, "}"]} <tool', ('<tool_call>{"nom": [1, "}"]} <tool', [])),
    ("hermes", f'<tool_call>{{"name": "weather", "arguments": {ARGS[:20]}', ("", [("weather", ARGS[:20])])),
    ("hermes", '<tool_call>{"name": "wea', ('<tool_call>{"name": "wea', [])),
    ("hermes", f"<tool_call>{json.dumps({'name': 'weather', 'arguments': ARGS})}</tool_call>", ("", ONE)),
    ("hermes", '<tool_call>{"name": "now"}</tool_call>', ("", [("now", "{}")])),
    ("llama3_json", f'{{"name": "weather", "parameters": {ARGS}}}; {{"name": "now", "parameters": {{}}}}', ("", TWO)),
    ("llama3_json", f'<|python_tag|>{{"name": "weather", "parameters": {ARGS}}}', ("", ONE)),
    ("llama3_json", '{"name": "Ann", "age": 5}', ('{"name": "Ann", "age": 5}', [])),
    ("llama3_json", ' {"a": {"name": "weather"}} x', (' {"a": {"name": "weather"}} x', [])),
    ("pythonic", f"[{PYTHONIC}, now()]", ("", TWO)),
    ("pythonic", f"<|python_start|>[{PYTHONIC}]<|python_end|>", ("", ONE)),
    ("pythonic", "[weather(city=1+2)]", ("[weather(city=1+2)]", [])),
    ("pythonic", "[1, 2] is a list", ("[1, 2] is a list", [])),
    ("mistral", f"[TOOL_CALLS][{CALL}, {NOW}]", ("", TWO)),
    ("mistral_v11", f"Hm.[TOOL_CALLS]weather[ARGS]{ARGS}[TOOL_CALLS]now[CALL_ID]123456789[ARGS]{{}}", ("Hm.", TWO)),
    ("mistral_v11", f"[TOOL_CALLS]weather{ARGS}", ("", ONE)),
    ("deepseek_v3",
     f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n```json\n{ARGS}\n"
     "```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>now\n```json\n{}\n"
     "```<｜tool▁call▁end｜><｜tool▁calls▁end｜>", ("", TWO)),
    ("deepseek_v31",
     f"Ok.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>weather<｜tool▁sep｜>{ARGS}<｜tool▁call▁end｜>"
     "<｜tool▁call▁begin｜>now<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>", ("Ok.", TWO)),
    ("granite", f"<|tool_call|>[{CALL}, {NOW}]", ("", TWO)),
    ("phi4_mini_json", f'<|tool_call|>[{{"type": "function", "function": {CALL}}}]<|/tool_call|>', ("", ONE)),
    ("phi4_mini_json", f"functools[{CALL}]", ("", ONE)),
    ("qwen3_coder",
     "Fine.\n<tool_call>\n<function=weather>\n<parameter=city>\n" + NASTY["city"] + "\n</parameter>\n"
     "<parameter=days>\n2\n</parameter>\n<parameter=deep>\n" + json.dumps(NASTY["deep"]) + "\n</parameter>\n"
     "</function>\n</tool_call>\n<tool_call>\n<function=now>\n</function>\n</tool_call>", ("Fine.", TWO)),
    ("qwen3_coder", "<tool_call> no </tool_call>", ("<tool_call> no </tool_call>", [])),
    ("harmony",
     "<|channel|>commentary<|message|>I will look.<|end|><|start|>assistant<|channel|>commentary to=functions.weather "
     f"<|constrain|>json<|message|>{ARGS}<|call|>", ("I will look.", ONE)),
    ("harmony", "<|channel|>final<|message|>Hi {you} <|end", ("Hi {you} <|end", [])),
]  # fmt: skip


def parser(name: str, max_calls: int | None = None) -> AnswerParser:
    if name == "harmony":
        return HarmonyParser(max_calls)
    return ToolParser(BY_NAME[name], TOOLS, max_calls)


def taken_apart(machine: AnswerParser, parts: list[str]) -> list[tuple[str, str]]:
    pieces = [piece for part in parts for piece in machine.feed(part)]
    return [(piece.kind, piece.text) for piece in merged(pieces + machine.finish())]


def as_expected(pieces: list[tuple[str, str]]) -> Expected:
    text, calls = "", []
    for kind, part in pieces:
        if kind == "text":
            text += part
        elif kind == "call":
            calls.append((part, ""))
        elif kind == "arguments":
            calls[-1] = (calls[-1][0], calls[-1][1] + part)
    return text, calls


@pytest.mark.parametrize(("name", "answer", "expected"), CASES, ids=[f"{c[0]}-{i}" for i, c in enumerate(CASES)])
def test_right_and_the_same_for_every_cut(name: str, answer: str, expected: Expected) -> None:
    whole = taken_apart(parser(name), [answer])
    assert as_expected(whole) == expected
    assert taken_apart(parser(name), list(answer)) == whole
    for cut in range(1, len(answer)):
        assert taken_apart(parser(name), [answer[:cut], answer[cut:]]) == whole, (answer[:cut], answer[cut:])


PARTS = ('{"name": "now", "arguments": ', "[now(", "<function=now>", "<parameter=a>", "</parameter>", "</function>")
MARKS = sorted({mark for style in BY_NAME.values() for mark in style.special} | set(PARTS))
SOUP = st.lists(
    st.one_of(st.sampled_from(MARKS), st.sampled_from(list('{}[]":, \n\\ax(1)=<|')), st.sampled_from([CALL, NOW])),
    max_size=12,
).map("".join)


@settings(max_examples=150, deadline=None)
@given(st.sampled_from(sorted(BY_NAME)), SOUP, st.lists(st.integers(0, 400), max_size=6))
def test_any_soup_of_marks_is_the_same_for_any_cuts(name: str, answer: str, cuts: list[int]) -> None:
    whole = taken_apart(parser(name), [answer])
    places = [0, *sorted(cut for cut in cuts if cut < len(answer)), len(answer)]
    assert taken_apart(parser(name), [answer[a:b] for a, b in itertools.pairwise(places)]) == whole
    assert taken_apart(parser(name), list(answer)) == whole


def test_what_is_no_call_is_untouched() -> None:
    text = "  Braces {like: this}, [lists], <tags> and <tool_calls> are text.  \n"
    for name in sorted(set(BY_NAME) - {"harmony"}):
        assert taken_apart(parser(name), list(text)) == [("text", text)]


@pytest.mark.parametrize("name", ["hermes", "mistral", "pythonic", "harmony"])
def test_calls_beyond_the_limit_are_dropped(name: str) -> None:
    answer = next(answer for style, answer, expected in CASES if style == name and len(expected[1]) == 2) \
        if name != "harmony" else CASES[-2][1] + CASES[-2][1]  # fmt: skip
    _, calls = as_expected(taken_apart(parser(name, 1), list(answer)))
    assert calls == ONE


def test_many_false_starts() -> None:
    """Half a million characters: far too many for anything that reads them more than once or twice."""
    machine = parser("hermes")
    text = "<tool_call>x <tool_call>{ " * 20_000
    pieces = machine.feed(text)
    assert "".join(piece.text for piece in pieces + machine.finish()) == text


@pytest.mark.parametrize(
    ("template", "name"),
    [
        ("{% if tools %}<tool_call>{% endif %}", "hermes"), ("<|python_tag|>{{ x }}", "llama3_json"),
        ("[AVAILABLE_TOOLS] [TOOL_CALLS]", "mistral"), ("[TOOL_CALLS]f[ARGS]", "mistral_v11"),
        ("<｜tool▁call▁begin｜>function ```json", "deepseek_v3"), ("<｜tool▁call▁begin｜>", "deepseek_v31"),
        ("<tool_call><function=f><parameter=p>", "qwen3_coder"), ("<|tool_call|>", "granite"),
        ("<|tool_call|>x<|/tool_call|>", "phi4_mini_json"), ("<|channel|>x<|message|>", "harmony"),
        ("{{ messages }}", None), (None, None),
    ],
)  # fmt: skip
def test_the_template_tells_the_format(template: str | None, name: str | None) -> None:
    found = format_of_template(template)
    assert (found.name if found else None) == name


def test_names_of_other_engines() -> None:
    assert find_format("qwen3") is BY_NAME["hermes"] and find_format("openai") is BY_NAME["harmony"]
    assert find_format("nonsense") is None


THINK = REASONING["think"]


@pytest.mark.parametrize(
    ("answer", "opened", "expected"),
    [
        ("<think>\nHm, {x}.\n</think>\n\nYes.", False, [("reasoning", "Hm, {x}."), ("text", "Yes.")]),
        ("Hm.</think>Yes", True, [("reasoning", "Hm."), ("text", "Yes")]),
        ("Hm, cut of", True, [("reasoning", "Hm, cut of")]),
        ("\n<think>a</think>", False, [("reasoning", "a")]),
        ("No <think>thought</think>", False, [("text", "No <think>thought</think>")]),
        ("<thin", False, [("text", "<thin")]),
        (f"Hm.</think>\n<tool_call>{NOW}</tool_call>", True,
         [("reasoning", "Hm."), ("call", "now"), ("arguments", "{}")]),
        (f"<tool_call>{NOW}</tool_call></think>x", True,
         [("reasoning", f"<tool_call>{NOW}</tool_call>"), ("text", "x")]),
    ],
)  # fmt: skip
def test_reasoning_is_split_off(answer: str, opened: bool, expected: list[tuple[str, str]]) -> None:
    def machine() -> AnswerParser:
        return ReasoningParser(THINK, ToolParser(BY_NAME["hermes"], TOOLS), opened=opened)

    assert taken_apart(machine(), [answer]) == expected
    for cut in range(1, len(answer)):
        assert taken_apart(machine(), [answer[:cut], answer[cut:]]) == expected, answer[:cut]
    assert taken_apart(machine(), list(answer)) == expected


def test_reasoning_in_a_channel() -> None:
    answer = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>Yes.<|return|>"
    assert taken_apart(parser("harmony"), list(answer)) == [("reasoning", "Hm."), ("text", "Yes.")]


def test_whether_the_prompt_has_opened_it() -> None:
    assert is_open("...assistant\n<think>\n", THINK)
    assert not is_open("...assistant\n", THINK) and not is_open("<think>a</think>\nuser", THINK)
    assert not is_open("<think>\n\n</think>\n\n", THINK)


def test_plain_text() -> None:
    assert taken_apart(TextParser(), list("<think>")) == [("text", "<think>")]
