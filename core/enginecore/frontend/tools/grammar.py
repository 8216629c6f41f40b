"""Calls that must happen, as a grammar: whatever the model writes is a call of a tool with arguments that its schema
allows, in the way of writing that the model knows.

The separators of forced arguments are fixed, as `json.dumps` writes them, and so are the names: all of that is forced
text, which costs no steps of its own.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

from enginecore.frontend.reasoning import ReasoningFormat
from enginecore.frontend.structured import COMPACT, GrammarChecker, free_text_with, json_grammar, lark_string
from enginecore.frontend.structured_schema import closed
from enginecore.frontend.tools.formats import ToolFormat

#: Parallel calls of one forced answer, at most.
MAX_CALLS = 16
#: The id of a special token that is written so, None for ordinary text.
SpecialToken = Callable[[str], "int | None"]

_NO_PARAMETERS: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}


class Writer:
    """Lark for literal text of a model's own: marks that are special tokens stand as tokens."""

    def __init__(self, marks: tuple[str, ...], special: SpecialToken) -> None:
        self._tokens = {mark: token for mark in marks if (token := special(mark)) is not None}
        ordered = sorted(self._tokens, key=len, reverse=True)
        self._split = re.compile("(" + "|".join(map(re.escape, ordered)) + ")") if ordered else None

    def literal(self, text: str) -> str:
        """A sequence of Lark items for `text`, "" for none."""
        parts = self._split.split(text) if self._split is not None else [text]
        items = (f"<[{self._tokens[part]}]>" if part in self._tokens else lark_string(part) for part in parts if part)
        return " ".join(items)


def arguments_schema(tool: dict[str, Any]) -> Any:
    """What the arguments of a tool must look like: its parameters; nothing where it names none."""
    return tool["function"].get("parameters") or _NO_PARAMETERS


def check_tool_schemas(tools: list[dict[str, Any]], checker: GrammarChecker) -> list[dict[str, Any]]:
    """The tools' grammars, each of them checked under its own name. ParameterError for one that cannot be followed."""
    grammars = []
    for index, tool in enumerate(tools):
        where = f"tools[{index}].function.parameters"
        text = checker.check(json_grammar(closed(arguments_schema(tool)), where, whitespace=COMPACT), where)
        grammars.append({**json.loads(text)["grammars"][0], "name": f"arguments_{index}"})
    return grammars


def forced_calls(
    style: ToolFormat, tools: list[dict[str, Any]], grammars: list[dict[str, Any]], writer: Writer, *, parallel: bool
) -> str:
    """An answer of calls and nothing else."""
    lark = ["start: " + _calls(style, writer, parallel=parallel), *_rules(style, tools, writer)]
    return _document("\n".join(lark), grammars)


def allowed_calls(
    style: ToolFormat, tools: list[dict[str, Any]], grammars: list[dict[str, Any]], writer: Writer, *, parallel: bool
) -> str | None:
    """Free text in which whatever begins like a call is one. None where the format has nothing that begins a call."""
    opens = style.write_first or style.write_begin
    mark = next((each for each in (*style.opens, *style.ignored) if opens.startswith(each)), None)
    if mark is None or style.layout == "harmony":  # where the same mark begins what is no call
        return None
    calls = _calls(style, writer, parallel=parallel and bool(style.write_first), mark=mark)
    rules = _rules(style, tools, writer, mark="" if style.write_first else mark)
    document = json.loads(free_text_with([(writer.literal(mark), calls, "tagged")], grammars))
    document["grammars"][0]["lark_grammar"] += "\n".join(rules) + "\n"
    return json.dumps(document, ensure_ascii=False)


def _calls(style: ToolFormat, writer: Writer, *, parallel: bool, mark: str = "") -> str:
    first, last = writer.literal(style.write_first.removeprefix(mark)), writer.literal(style.write_last)
    between = writer.literal(style.write_between)
    more = f" ({between} call){{0,{MAX_CALLS - 1}}}" if parallel else ""
    return " ".join(part for part in (first, "call" + more, last) if part)


def _rules(style: ToolFormat, tools: list[dict[str, Any]], writer: Writer, mark: str = "") -> list[str]:
    lines = ["call: " + " | ".join(f"call_{index}" for index in range(len(tools)))]
    end = writer.literal(style.write_end)
    for index, tool in enumerate(tools):
        name = json.dumps(tool["function"]["name"], ensure_ascii=False)[1:-1]
        begin = writer.literal((style.write_begin % name).removeprefix(mark))
        lines.append(f"call_{index}: {begin} @arguments_{index} {end}".rstrip())
    return lines


def text_or_calls(text: str, calls: str) -> str:
    """An answer that is one or the other."""
    parts = _parts(text, "text_answer") + _parts(calls, "forced_calls")
    return _document("start: @text_answer | @forced_calls", parts)


def _parts(grammar: str, name: str) -> list[dict[str, Any]]:
    """The grammars of a document, or of one in Lark's notation, the first of them under `name`."""
    parts = json.loads(grammar)["grammars"] if grammar.lstrip().startswith("{") else [{"lark_grammar": grammar}]
    return [{**parts[0], "name": name}, *parts[1:]]


def after_reasoning(grammar: str, style: ReasoningFormat, writer: Writer, *, opened: bool) -> str:
    """The same grammar for an answer that thinks first: it must when the prompt has `opened` it, else it may."""
    end = writer.literal(style.end)
    thinks = f"THOUGHT {end}" if end.startswith("<[") else "thought_end"
    lines = [r"THOUGHT: /(.|\n)*/", r"GAP: /[ \n]{1,4}/"]
    if thinks == "thought_end":
        lines.append(f"thought_end[lazy]: THOUGHT {end}")
    thinking = f"{thinks} GAP?" if opened else f"({writer.literal(style.begin)} {thinks} GAP?)?"
    return _document(f"start: {thinking} @answer\n" + "\n".join(lines), _parts(grammar, "answer"))


def in_channels(grammar: str, writer: Writer, *, calls: bool) -> str:
    """The same grammar in harmony's channels: perhaps an analysis first, then the calls, which name their channel
    themselves, or the final message."""
    end = writer.literal("<|end|>")
    thinks = f"THOUGHT {end}" if end.startswith("<[") else "thought_end"
    lines = [r"THOUGHT: /(.|\n)*/", *([f"thought_end[lazy]: THOUGHT {end}"] if thinks == "thought_end" else [])]
    begin, again = writer.literal("<|channel|>analysis<|message|>"), writer.literal("<|start|>assistant")
    header = "" if calls else writer.literal("<|channel|>final<|message|>")
    lark = f"start: ({begin} {thinks} {again})? {header} @answer\n" + "\n".join(lines)
    return _document(lark, _parts(grammar, "answer"))


def _document(lark: str, grammars: list[dict[str, Any]]) -> str:
    head = {"name": "calls", "lark_grammar": "%llguidance {}\n" + lark + "\n"}
    return json.dumps({"grammars": [head, *grammars]}, ensure_ascii=False)
