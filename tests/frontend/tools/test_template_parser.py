"""The generic parser: what transformers' own parser makes of an answer, for every cut of it."""

from __future__ import annotations

import json
from typing import Any

import pytest
from enginecore.errors import ParameterError
from enginecore.frontend.tools.pieces import merged
from enginecore.frontend.tools.template_parser import ResponseTemplate, TemplateParser

THINK = {"open": "<think>", "close": "</think>", "content": "text"}
FUNCTION = {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}}


def template(tool_calls: dict[str, Any], **content: Any) -> dict[str, Any]:
    fields = {"reasoning_content": THINK, "tool_calls": {"repeats": True, **tool_calls},
              "content": {"content": "text", **content}}  # fmt: skip
    return {"defaults": {"role": "assistant"}, "start_anchor": "<|im_start|>assistant\n", "fields": fields}


JSON = template({"open_pattern": r"\s*<tool_call>", "close": "</tool_call>", "content": "json",
                 "transform": {"type": "function", "function": "{content}"}},
                close_pattern=r"\s*(?:<\|im_end\|>|<\|endoftext\|>)")  # fmt: skip
TAGS = template({"open_pattern": r"\s*<tool_call>\s*<function=(?P<name>[^>\n]+)>",
                 "close_pattern": r"</function>\s*</tool_call>", "content": "xml-inline", "transform": FUNCTION,
                 "content_args": {"tag_pattern":
                     r"<parameter=(?P<key>[^>\n]+)>\s*(?P<value>.*?)\s*</parameter>"}})  # fmt: skip
BARE = template({"open_pattern": r"<\|tool_call>call:(?P<name>\w+)", "close": "<tool_call|>", "content": "json",
                 "content_args": {"unquoted_keys": True, "string_delims": [['<|"|>', '<|"|>']]},
                 "transform": FUNCTION}, close=["<turn|>", "<eos>"])  # fmt: skip
PYTHON = template({"open": "<calls>", "close": "</calls>", "content": "python-call-list", "transform_each": True,
                   "transform": {"function": {"name": "{name}", "arguments": "{arguments}"}}})  # fmt: skip
LINES = template({"open_pattern": r"@(?P<name>\w+)\n", "close": "\n@end", "content": "kv-lines", "transform": FUNCTION})

CASES: list[tuple[dict[str, Any], str]] = [
    (JSON, 'Hello {you}.\n<|im_end|>\n<|endoftext|>'), (JSON, "<think>\nHm.\n</think>\n\nYes."),
    (JSON, 'See.\n<tool_call>\n{"name": "f", "arguments": {"a": "é😀", "b": [1]}}\n</tool_call>\n'
           '<tool_call>{"name": "g", "arguments": {}}</tool_call><|im_end|>'),
    (TAGS, "Ok. <tool_call>\n<function=f>\n<parameter=a>\nx <b>\n</parameter>\n<parameter=c>1</parameter>\n"
           "</function>\n</tool_call>"),
    (BARE, 'So <|tool_call>call:f{a:<|"|>x, {y: "z"}<|"|>,b:2}<tool_call|><turn|>'),
    (PYTHON, "<calls>[f(a='x', b=[1, True]), g()]</calls> and more"), (LINES, "@f\na: 1\nb: two: three\n@end"),
]  # fmt: skip


def taken(spec: dict[str, Any], parts: list[str], prefix: str = "", limit: int | None = None) -> list[tuple[str, str]]:
    parser = TemplateParser(ResponseTemplate(spec), prefix, limit)
    pieces = [piece for part in parts for piece in parser.feed(part)]
    return [(piece.kind, piece.text) for piece in merged(pieces + parser.finish())]


def oracle(spec: dict[str, Any], text: str, prefix: str = "") -> list[Any]:
    from transformers.utils.chat_parsing import parse_response

    message = parse_response(text, spec, prefix=f"<|im_start|>assistant\n{prefix}")
    calls = [call["function"] for entry in message.get("tool_calls", [])
             for call in (entry if isinstance(entry, list) else [entry])]  # fmt: skip
    return [message.get("reasoning_content"), message.get("content"), [(c["name"], c["arguments"]) for c in calls]]


def message_of(pieces: list[tuple[str, str]]) -> list[Any]:
    joined = {kind: "".join(text for each, text in pieces if each == kind) or None for kind in ("reasoning", "text")}
    names = [text for kind, text in pieces if kind == "call"]
    values = [json.loads(text) for kind, text in pieces if kind == "arguments"]
    return [joined["reasoning"], joined["text"], list(zip(names, values, strict=True))]


@pytest.mark.parametrize(("spec", "text"), CASES)
def test_as_transformers_reads_it_and_the_same_for_every_cut(spec: dict[str, Any], text: str) -> None:
    whole = taken(spec, [text])
    assert message_of(whole) == oracle(spec, text)
    assert taken(spec, list(text)) == whole
    for cut in range(1, len(text)):
        assert taken(spec, [text[:cut], text[cut:]]) == whole, text[:cut]


def test_what_the_prompt_has_begun() -> None:
    spec = ResponseTemplate(JSON)
    assert spec.prefix("<|im_start|>user\n<think><|im_start|>assistant\n<think>\n") == "<think>\n"
    assert spec.prefix("no anchor") == ""
    assert taken(JSON, ["Hm.", "</think>Yes"], "<think>\n") == [("reasoning", "Hm."), ("text", "Yes")]
    assert message_of(taken(JSON, ["Hm.</think>Yes"], "<think>\n")) == oracle(JSON, "Hm.</think>Yes", "<think>\n")


def test_what_is_no_call_stays_text() -> None:
    for body in ("oops", '{"nom": 1}', "5", '{"name": 5}'):
        text = f"<tool_call>{body}</tool_call>"
        assert taken(JSON, list(text)) == [("text", text)]
    for text in ("<tool_call>{", "<tool_ca"):
        assert taken(JSON, list(text)) == [("text", text)]
    assert taken(JSON, ['<tool_call>{"name": "f"}</tool_call>' * 2], limit=1) == [("call", "f"), ("arguments", "{}")]


@pytest.mark.parametrize("spec", [
    {}, {"fields": {}}, {"fields": {"a": {}, "b": {}}}, {"fields": {"a": {"open_pattern": "("}}}, 5,
    {"fields": {"a": {"content": "yaml"}}},
])  # fmt: skip
def test_templates_that_cannot_be_used(spec: Any) -> None:
    with pytest.raises(ParameterError, match="response template"):
        ResponseTemplate(spec)
