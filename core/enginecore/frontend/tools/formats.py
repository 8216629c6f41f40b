"""How models write calls of functions, as data.

A format is read by `parser.py` and written, where a call is forced, by `grammar.py`. `auto` picks one by marks in the
chat template, which is what the model was taught with. Sources: the chat templates that the model families publish.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

Layout = Literal["json", "pythonic", "xml", "harmony"]


@dataclass(frozen=True, kw_only=True)
class ToolFormat:
    """One way to write calls.

    `opens`: what begins a call in the midst of text. `bare`: characters with which an answer that is a call may start.
    `closes`: what may follow a call and is no text. `ignored`: marks around calls that are no text either.
    Layout "json" reads after an opening mark `{...}` with the members `name_keys` and `arguments_keys` (perhaps inside
    a member "function"), a list of such, or, when there are `name_ends`, a name, one of these, and the arguments.
    `write_begin` ("%s" is the name), `write_end`, `write_between`, `write_first` and `write_last` are how forced calls
    are written. `marks` in a chat template, all of them, tell that a model writes so; `not_marks` that it does not.
    `call_id`: "long" or "short" (nine letters and digits, which some templates insist on).
    """

    name: str
    layout: Layout = "json"
    opens: tuple[str, ...] = ()
    bare: str = ""
    closes: tuple[str, ...] = ()
    ignored: tuple[str, ...] = ()
    name_keys: tuple[str, ...] = ("name",)
    arguments_keys: tuple[str, ...] = ("arguments", "parameters")
    name_ends: tuple[str, ...] = ()
    write_begin: str = ""
    write_end: str = ""
    write_between: str = ""
    write_first: str = ""
    write_last: str = ""
    marks: tuple[str, ...] = ()
    not_marks: tuple[str, ...] = ()
    call_id: Literal["long", "short"] = "long"

    @property
    def special(self) -> tuple[str, ...]:
        """Marks that may be special tokens, whose text the parser has to see."""
        return tuple(dict.fromkeys([*self.opens, *self.closes, *self.ignored, *self.name_ends]))


_HERMES = ToolFormat(
    name="hermes",
    opens=("<tool_call>",),
    closes=("</tool_call>",),
    write_begin='<tool_call>\n{"name": "%s", "arguments": ',
    write_end="}\n</tool_call>",
    write_between="\n",
    marks=("<tool_call>",),
)
_LLAMA3 = ToolFormat(
    name="llama3_json",
    opens=("<|python_tag|>",),
    closes=(";",),
    bare="{",
    write_begin='{"name": "%s", "parameters": ',
    write_end="}",
    write_between="; ",
    marks=("<|python_tag|>",),
)
_MISTRAL = ToolFormat(
    name="mistral",
    opens=("[TOOL_CALLS]",),
    ignored=("[CALL_ID]",),
    name_ends=("[ARGS]", "[CALL_ID]", "{"),
    write_begin='{"name": "%s", "arguments": ',
    write_end="}",
    write_between=", ",
    write_first="[TOOL_CALLS][",
    write_last="]",
    marks=("[TOOL_CALLS]",),
    not_marks=("[ARGS]",),
    call_id="short",
)
_DEEPSEEK = ToolFormat(
    name="deepseek_v3",
    opens=("<｜tool▁call▁begin｜>function<｜tool▁sep｜>",),
    closes=("\n```<｜tool▁call▁end｜>", "```<｜tool▁call▁end｜>", "<｜tool▁call▁end｜>"),
    ignored=("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
    name_ends=("\n```json\n",),
    write_begin="<｜tool▁call▁begin｜>function<｜tool▁sep｜>%s\n```json\n",
    write_end="\n```<｜tool▁call▁end｜>",
    write_between="\n",
    write_first="<｜tool▁calls▁begin｜>",
    write_last="<｜tool▁calls▁end｜>",
    marks=("<｜tool▁call▁begin｜>", "```json"),
)

FORMATS: tuple[ToolFormat, ...] = (
    ToolFormat(
        name="harmony",
        layout="harmony",
        ignored=("<|channel|>", "<|message|>", "<|start|>", "<|end|>", "<|call|>", "<|return|>", "<|constrain|>"),
        write_begin="<|channel|>commentary to=functions.%s <|constrain|>json<|message|>",
        marks=("<|channel|>", "<|message|>"),
    ),
    _MISTRAL,
    replace(
        _MISTRAL,
        name="mistral_v11",
        write_begin="[TOOL_CALLS]%s[ARGS]",
        write_end="",
        write_between="",
        write_first="",
        write_last="",
        marks=("[TOOL_CALLS]", "[ARGS]"),
        not_marks=(),
    ),
    _DEEPSEEK,
    replace(
        _DEEPSEEK,
        name="deepseek_v31",
        opens=("<｜tool▁call▁begin｜>",),
        closes=("<｜tool▁call▁end｜>",),
        name_ends=("<｜tool▁sep｜>",),
        write_begin="<｜tool▁call▁begin｜>%s<｜tool▁sep｜>",
        write_end="<｜tool▁call▁end｜>",
        write_between="",
        marks=("<｜tool▁call▁begin｜>",),
        not_marks=("```json",),
    ),
    ToolFormat(
        name="qwen3_coder",
        layout="xml",
        opens=("<tool_call>",),
        closes=("</tool_call>",),
        write_begin=_HERMES.write_begin,
        write_end=_HERMES.write_end,
        write_between="\n",
        marks=("<function=", "<parameter="),
    ),
    ToolFormat(
        name="phi4_mini_json",
        opens=("<|tool_call|>", "functools"),
        closes=("<|/tool_call|>",),
        write_begin='{"type": "function", "function": {"name": "%s", "arguments": ',
        write_end="}}",
        write_between=", ",
        write_first="<|tool_call|>[",
        write_last="]<|/tool_call|>",
        marks=("<|/tool_call|>",),
    ),
    ToolFormat(
        name="granite",
        opens=("<|tool_call|>", "<tool_call>"),
        closes=("</tool_call>",),
        write_begin='{"name": "%s", "arguments": ',
        write_end="}",
        write_between=", ",
        write_first="<|tool_call|>[",
        write_last="]",
        marks=("<|tool_call|>",),
    ),
    _HERMES,
    replace(
        _LLAMA3,
        name="pythonic",
        layout="pythonic",
        opens=("<|python_start|>",),
        closes=("<|python_end|>", ";"),
        bare="{[",
        marks=("func_name1(params_name1=",),
    ),
    _LLAMA3,
)

BY_NAME = {each.name: each for each in FORMATS}
ALIASES = {
    **dict.fromkeys(("qwen", "qwen25", "qwen3"), "hermes"),
    **dict.fromkeys(("llama3", "llama4_json"), "llama3_json"),
    **dict.fromkeys(("openai", "gpt_oss"), "harmony"),
    "llama4_pythonic": "pythonic",
    "deepseek": "deepseek_v3",
    "phi": "phi4_mini_json",
    "qwen3_xml": "qwen3_coder",
}

#: What forced calls are written in when the model's own way is not known.
DEFAULT = _HERMES


def find_format(name: str) -> ToolFormat | None:
    """A format by its name or one that other engines give it."""
    return BY_NAME.get(ALIASES.get(name, name))


def format_of_template(template: str | None) -> ToolFormat | None:
    """The format whose marks the chat template has; the first in the order of FORMATS."""
    if not template:
        return None
    for each in FORMATS:
        if all(mark in template for mark in each.marks) and not any(mark in template for mark in each.not_marks):
            return each
    return None
