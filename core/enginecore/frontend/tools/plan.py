"""What a chat request asks of the form of its answer, and how the answer is taken apart: tools, reasoning, structure.

A `Dialect` is what one model writes like; it is found once. A `Plan` is made for each request.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

from enginecore.constraints import StructuredOutputsParams, Thinking
from enginecore.errors import ParameterError
from enginecore.frontend import reasoning, structured
from enginecore.frontend.input_processor import AnswerForm
from enginecore.frontend.reasoning import ReasoningFormat, ReasoningParser, TextParser, is_open
from enginecore.frontend.structured import GrammarChecker
from enginecore.frontend.tools import formats
from enginecore.frontend.tools.formats import ToolFormat
from enginecore.frontend.tools.grammar import (
    Writer,
    after_reasoning,
    allowed_calls,
    check_tool_schemas,
    forced_calls,
    in_channels,
    text_or_calls,
)
from enginecore.frontend.tools.harmony import HarmonyParser
from enginecore.frontend.tools.parser import ToolParser
from enginecore.frontend.tools.pieces import AnswerParser
from enginecore.frontend.tools.request import ToolChoice, answer_structure
from enginecore.frontend.tools.template_parser import ResponseTemplate, TemplateParser

#: Of one answer's grammar, all tools together.
MAX_FORM_CHARS = 512 * 1024


class TokenizerLike(Protocol):
    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]: ...
    def special_token_id(self, text: str) -> int | None: ...
    @property
    def special_token_ids(self) -> frozenset[int]: ...


@dataclass(frozen=True)
class Dialect:
    """How a model writes calls and thinks; None for ways that are not known. `template`, the checkpoint's own response
    template, tells both where the formats do not."""

    tools: ToolFormat | None
    reasoning: ReasoningFormat | None
    tokenizer: TokenizerLike
    template: ResponseTemplate | None = None

    def writer(self, style: ToolFormat) -> Writer:
        marks = style.special if self.reasoning is None else (*style.special, self.reasoning.begin, self.reasoning.end)
        return Writer(marks, self.tokenizer.special_token_id)


def find_dialect(
    template: str | None, tokenizer: TokenizerLike, tools: str = "auto", thinking: str = "auto"
) -> Dialect:
    """`tools` and `thinking` are names of formats, "auto" (what the chat template tells) or "none". The name "template"
    and, where the chat template tells nothing, "auto" mean the checkpoint's response template. ParameterError for names
    that are not known."""
    check_parsers(tools, thinking)
    style = formats.format_of_template(template) if tools == "auto" else formats.find_format(tools)
    spec = getattr(tokenizer, "response_template", None)
    if tools == "template" and spec is None:
        raise ParameterError("the checkpoint has no response template", param="tool_call_parser")
    if spec is not None and style is None and tools in ("auto", "template"):
        return Dialect(None, None, tokenizer, ResponseTemplate(spec))
    thought = reasoning.reasoning_of_template(template) if thinking == "auto" else reasoning.find_reasoning(thinking)
    return Dialect(style, thought, tokenizer)


def check_parsers(tools: str, thinking: str) -> None:
    """ParameterError for a name that is not known."""
    for name, given, find, known in (
        ("tool_call_parser", tools, formats.find_format, formats.BY_NAME),
        ("reasoning_parser", thinking, reasoning.find_reasoning, reasoning.BY_NAME),
    ):
        own = ["auto", "none", "template"] if name == "tool_call_parser" else ["auto", "none"]
        if given not in own and find(given) is None:
            told = ", ".join([*own, *sorted(known)])
            raise ParameterError(f"{name} must be one of {told}; got {given!r}", param=name)


@dataclass(frozen=True)
class Plan:
    """One request's. `shown_tools` are those that the template shows, None for none."""

    dialect: Dialect
    choice: ToolChoice = field(default_factory=ToolChoice)
    structure: StructuredOutputsParams | None = None
    structure_param: str = "structured_outputs"
    thinking_budget: int | None = None

    @property
    def shown_tools(self) -> list[dict[str, Any]] | None:
        return self.choice.tools or None

    @property
    def style(self) -> ToolFormat | None:
        """The format of the answer's calls, None when it can have none."""
        if not self.choice.tools:
            return None
        return self.dialect.tools or (formats.DEFAULT if self.choice.mode == "required" else None)

    @property
    def plain(self) -> bool:
        """Whether the answer is text and nothing else."""
        known = self.style is not None or self.dialect.reasoning is not None or self.dialect.template is not None
        return not known and not self._in_channels

    @property
    def _in_channels(self) -> bool:
        tools, thought = self.dialect.tools, self.dialect.reasoning
        return "harmony" in (tools.layout if tools else "", thought.layout if thought else "")

    def form(self, prompt: str, checker: GrammarChecker) -> AnswerForm:
        """What to ask of the engine, for a prompt that reads so. Slow: compiles grammars. Raises ParameterError."""
        thought = self.dialect.reasoning
        opened = thought is not None and is_open(prompt, thought)
        grammar = self._grammar(checker)
        if grammar is not None and len(grammar) > MAX_FORM_CHARS:
            raise ParameterError(
                f"the schemas of tools are too large together: {len(grammar)} characters as a grammar, at most "
                f"{MAX_FORM_CHARS} may be",
                param="tools",
            )
        if grammar is not None and self._in_channels:
            writer = self.dialect.writer(formats.BY_NAME["harmony"])
            grammar = in_channels(grammar, writer, calls=self.choice.mode == "required")
        elif grammar is not None and thought is not None:
            writer = self.dialect.writer(self.style or formats.DEFAULT)
            grammar = after_reasoning(grammar, thought, writer, opened=opened)
        template = self.dialect.template
        prefix = "" if template is None else template.prefix(prompt)
        return AnswerForm(grammar, self._thinking(opened), self._shown_tokens(), opened, prefix)

    def _grammar(self, checker: GrammarChecker) -> str | None:
        structure = None
        if self.structure is not None:
            structure = structured.grammar_of(self.structure, checker, self.structure_param)
        style, choice = self.style, self.choice
        if style is None or (choice.mode != "required" and structure is None and not choice.strict):
            return structure
        tools = choice.tools if choice.mode == "required" or choice.strict else []
        schemas = check_tool_schemas(tools, checker)
        writer = self.dialect.writer(style)
        if choice.mode == "required":
            return forced_calls(style, tools, schemas, writer, parallel=choice.parallel)
        if structure is None:
            return allowed_calls(style, tools, schemas, writer, parallel=choice.parallel)
        schemas = schemas or check_tool_schemas(choice.tools, checker)
        return text_or_calls(structure, forced_calls(style, choice.tools, schemas, writer, parallel=choice.parallel))

    def _thinking(self, opened: bool) -> Thinking | None:
        if self.thinking_budget is None:
            return None
        thought = self.dialect.reasoning
        if thought is None:
            raise ParameterError(
                "thinking_token_budget has no effect: the model is not known to think",
                param="thinking_token_budget",
                fix="start with --reasoning-parser NAME",
            )
        encode = self.dialect.tokenizer.encode
        begin, end = (encode(text, add_special_tokens=False) for text in (thought.begin, thought.end))
        return Thinking([] if opened else begin, end, self.thinking_budget)

    def _shown_tokens(self) -> frozenset[int]:
        """Special tokens whose text the parser has to see."""
        if self.plain:
            return frozenset()
        if self.dialect.template is not None:  # any of them may be a delimiter
            return frozenset(self.dialect.tokenizer.special_token_ids)
        marks = list(self.style.special) if self.style is not None else []
        if self._in_channels:
            marks += formats.BY_NAME["harmony"].special
        if self.dialect.reasoning is not None:
            marks += [self.dialect.reasoning.begin, self.dialect.reasoning.end]
        found = (self.dialect.tokenizer.special_token_id(mark) for mark in marks)
        return frozenset(token for token in found if token is not None)

    def parser(self, *, opened: bool, prefix: str = "") -> AnswerParser:
        """A new one for one answer. `opened` and `prefix` are the form's."""
        limit = None if self.choice.parallel else 1
        style, thought = self.style, self.dialect.reasoning
        if self.dialect.template is not None and self.choice.mode != "required":
            return TemplateParser(self.dialect.template, prefix, limit if self.choice.tools else 0)
        if self._in_channels:
            return HarmonyParser(limit if style is not None else 0)
        rest: AnswerParser = TextParser()
        if style is not None:
            forced = self.choice.mode == "required"
            rest = ToolParser(style, self.choice.tools, limit, only_calls=forced)
        return rest if thought is None else ReasoningParser(thought, rest, opened=opened)


def make_plan(
    dialect: Dialect,
    *,
    tools: list[dict[str, Any]] | None,
    tool_choice: Any,
    parallel: bool,
    response_format: dict[str, Any] | None,
    structured_outputs: StructuredOutputsParams | None,
    thinking_budget: int | None,
) -> Plan:
    """Check what a request says about the form of its answer. Quick; ParameterError names the field."""
    choice = ToolChoice.of(tools, tool_choice, parallel=parallel)
    structure, param = answer_structure(response_format, structured_outputs)
    if structure is not None and param == "structured_outputs" and choice.mode == "required":
        raise ParameterError(
            "structured_outputs and a tool_choice that forces a call exclude each other", param="structured_outputs"
        )
    if choice.mode == "required":
        structure = None  # it speaks of text, and there will be none
    return Plan(dialect, choice, structure, param, thinking_budget)
