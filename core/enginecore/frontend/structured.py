"""What an answer must look like, as a grammar for llguidance: written here, checked here, followed in the engine.

A grammar is checked by compiling it for a vocabulary of single bytes, which takes no tokenizer and little time. So a
bad one is refused before anything is scheduled, by a ParameterError that names the field; it cannot do more harm than
its limits allow (`runner/grammar.py` compiles under the same ones). All of it runs in threads, off the event loop.
"""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections import OrderedDict
from typing import Any

import llguidance
from llguidance.gbnf_to_lark import any_to_lark

from enginecore.constraints import StructuredOutputsParams
from enginecore.errors import ParameterError
from enginecore.frontend.nesting import check_nesting
from enginecore.frontend.structured_schema import prepared

MAX_GRAMMAR_CHARS = 256 * 1024
MAX_SCHEMA_NESTING = 100
#: Between the parts of JSON: nothing, a space, or a new line with at most 12 characters of indentation.
WHITESPACE = r"\x20|\x0A[\x20\x09]{0,12}"
#: As json.dumps writes it. Every separator is then forced, which costs no steps.
COMPACT = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}

_LIMITS = llguidance.LLParserLimits(
    initial_lexer_fuel=1_000_000, step_lexer_fuel=200_000, max_lexer_states=50_000, verbose_errors=False
)
_MAX_CHECKED = 1024
#: Complaints that only a real vocabulary can settle.
_NEEDS_VOCABULARY = re.compile(
    r"special token|token.{0,20}(range|unknown|not found)|unknown.{0,20}token", re.IGNORECASE
)
#: The compiler's quotation of a grammar's line.
_QUOTED_LINE = re.compile(r"\s+\d+ \| .*", re.DOTALL)


class GrammarChecker:
    """Compiles grammars to see whether they are sound; remembers the outcome by content. Thread-safe."""

    def __init__(self) -> None:
        self._tokenizer = llguidance.LLTokenizer("byte")
        self._outcomes: OrderedDict[bytes, str | None] = OrderedDict()
        self._lock = threading.Lock()
        #: How many grammars were compiled rather than remembered.
        self.compiled = 0

    def check(self, grammar: str, param: str) -> str:
        """The grammar, if it is sound. ParameterError naming `param` otherwise."""
        if len(grammar) > MAX_GRAMMAR_CHARS:
            raise ParameterError(
                f"{param} is too large: {len(grammar)} characters as a grammar, at most {MAX_GRAMMAR_CHARS} may be",
                param=param,
            )
        key = hashlib.sha256(grammar.encode("utf-8", "surrogatepass")).digest()
        with self._lock:
            known = key in self._outcomes
            problem = self._outcomes.get(key)
        if not known:
            problem = self._problem(grammar)
            with self._lock:
                self.compiled += 1
                self._outcomes[key] = problem
                if len(self._outcomes) > _MAX_CHECKED:
                    self._outcomes.popitem(last=False)
        if problem is not None:
            raise ParameterError(f"{param} cannot be used: {problem}", param=param, code="invalid_grammar")
        return grammar

    def _problem(self, grammar: str) -> str | None:
        matcher = llguidance.LLMatcher(self._tokenizer, grammar, log_level=0, limits=_LIMITS)
        if not matcher.is_error():
            matcher.compute_bitmask()
        if not matcher.is_error():
            return None
        lines = [line.strip() for line in matcher.get_error().splitlines()]
        if lines and lines[0].startswith("NoExtension"):
            return "nothing satisfies it"
        text = _QUOTED_LINE.sub("", " ".join(line for line in lines if line))[:400] or "it does not compile"
        return None if _NEEDS_VOCABULARY.search(text) else text


def grammar_of(wanted: StructuredOutputsParams, checker: GrammarChecker, param: str = "structured_outputs") -> str:
    """The checked grammar of an answer. Errors call the field `param`, with the kind behind it."""
    where = f"{param}.{wanted.kind}"
    if wanted.json is not None:
        return checker.check(json_grammar(wanted.json, where, whitespace=_whitespace(wanted)), where)
    if wanted.json_object:
        return checker.check(json_grammar({"type": "object"}, where, whitespace=_whitespace(wanted)), where)
    if wanted.regex is not None:
        return checker.check(_regex(wanted.regex, where), where)
    if wanted.choice is not None:
        return checker.check(_choice(wanted.choice, where), where)
    if wanted.grammar is not None:
        return checker.check(_lark(wanted.grammar, where), where)
    return checker.check(_structural_tag(wanted.structural_tag, where), where)


def _whitespace(wanted: StructuredOutputsParams) -> dict[str, Any]:
    if wanted.disable_any_whitespace:
        return {"whitespace_flexible": False}
    return {"whitespace_pattern": wanted.whitespace_pattern or WHITESPACE}


def schema_of(value: Any, param: str) -> Any:
    """A JSON schema, checked as far as that goes without compiling it, and prepared."""
    if isinstance(value, str):
        check_nesting(value.encode("utf-8", "replace"), param, MAX_SCHEMA_NESTING)
        try:
            value = json.loads(value)
        except ValueError as error:
            raise ParameterError(f"{param} is not valid JSON: {error}", param=param) from error
    if not isinstance(value, (dict, bool)):
        raise ParameterError(f"{param} must be a JSON schema: an object or a boolean", param=param)
    if value is False:
        raise ParameterError(f"{param} cannot be used: nothing satisfies the schema false", param=param)
    try:
        text = json.dumps(value, allow_nan=False)
    except (ValueError, TypeError, RecursionError) as error:
        raise ParameterError(f"{param} is not JSON: {error}", param=param) from error
    if len(text) > MAX_GRAMMAR_CHARS:
        raise ParameterError(
            f"{param} is too large: {len(text)} characters, at most {MAX_GRAMMAR_CHARS} may be", param=param
        )
    check_nesting(text.encode(), param, MAX_SCHEMA_NESTING)
    return {} if value is True else prepared(value)


def json_grammar(schema: Any, param: str, *, whitespace: dict[str, Any] | None = None) -> str:
    """The grammar of JSON that a schema allows."""
    schema = schema_of(schema, param)
    try:
        options: Any = whitespace or {"whitespace_pattern": WHITESPACE}
        text: str = llguidance.LLMatcher.grammar_from_json_schema(json.dumps(schema), overrides=options)
    except ValueError as error:
        raise ParameterError(f"{param} cannot be used: {error}", param=param) from error
    return text


def _regex(regex: str, param: str) -> str:
    if not regex:
        raise ParameterError(f"{param} must not be empty", param=param)
    if len(regex) > MAX_GRAMMAR_CHARS:
        raise ParameterError(f"{param} is too large", param=param)
    text: str = llguidance.LLMatcher.grammar_from_regex(regex)
    return text


def _choice(choices: list[str], param: str) -> str:
    if not choices:
        raise ParameterError(f"{param} must not be empty", param=param)
    if not all(choices):
        raise ParameterError(f"{param} must not hold an empty string", param=param)
    return "start: " + " | ".join(lark_string(choice) for choice in dict.fromkeys(choices))


def _lark(grammar: str, param: str) -> str:
    """Lark's notation, or GBNF's, which is turned into it."""
    if not grammar.strip():
        raise ParameterError(f"{param} must not be empty", param=param)
    if len(grammar) > MAX_GRAMMAR_CHARS:
        raise ParameterError(f"{param} is too large", param=param)
    try:
        text: str = any_to_lark(grammar)
    except Exception as error:  # the converter raises what comes
        raise ParameterError(f"{param} cannot be read as a grammar: {error}"[:400], param=param) from error
    return text


def lark_string(text: str) -> str:
    """`text` as a literal of Lark's notation."""
    return json.dumps(text, ensure_ascii=False)


def free_text_with(tags: list[tuple[str, str, str]], grammars: list[dict[str, Any]] | None = None) -> str:
    """A grammar of free text in which, after a trigger, a rule must be followed: (trigger's Lark, rule's Lark, name).
    `grammars` are those that the rules name with @."""
    options = " | ".join(name for _, _, name in tags)
    lines = [f"start: ({options})* tail", "tail: TEXT", r"TEXT: /(.|\n)*/"]
    for trigger, rule, name in tags:
        if trigger.startswith("<["):  # a token, which ends any text
            lines.append(f"{name}: TEXT {trigger} {rule}")
        else:
            lines += [f"{name}_head[lazy]: TEXT {trigger}", f"{name}: {name}_head {rule}"]
    lark = "%llguidance {}\n" + "\n".join(lines) + "\n"
    return json.dumps({"grammars": [{"name": "text", "lark_grammar": lark}, *(grammars or [])]}, ensure_ascii=False)


def _structural_tag(value: Any, param: str) -> str:
    """{"structures": [{"begin", "schema", "end"}], "triggers": [...]}, or the same as a "triggered_tags" format."""
    if isinstance(value, str):
        check_nesting(value.encode("utf-8", "replace"), param, MAX_SCHEMA_NESTING)
        try:
            value = json.loads(value)
        except ValueError as error:
            raise ParameterError(f"{param} is not valid JSON: {error}", param=param) from error
    if not isinstance(value, dict):
        raise ParameterError(f"{param} must be an object", param=param)
    if isinstance(value.get("format"), dict):
        value = value["format"]
        if value.get("type") != "triggered_tags":
            raise ParameterError(f"{param}.format.type must be triggered_tags", param=f"{param}.format.type")
        structures = [
            {**tag, "schema": (tag.get("content") or {}).get("json_schema")}
            for tag in value.get("tags") or []
            if isinstance(tag, dict)
        ]
    else:
        structures = value.get("structures") or []
    triggers = value.get("triggers") or []
    if not isinstance(structures, list) or not structures or not isinstance(triggers, list) or not triggers:
        raise ParameterError(f"{param} must have structures and triggers", param=param)
    tags, grammars = [], []
    for index, structure in enumerate(structures):
        where = f"{param}.structures[{index}]"
        begin, end = (structure.get(name) if isinstance(structure, dict) else None for name in ("begin", "end"))
        if not isinstance(begin, str) or not isinstance(end, str):
            raise ParameterError(f"{where} must have begin and end as strings", param=where)
        trigger = next((each for each in triggers if isinstance(each, str) and each and begin.startswith(each)), None)
        if trigger is None:
            raise ParameterError(f"{where}.begin starts with none of the triggers", param=where)
        parts = json.loads(json_grammar(structure.get("schema"), f"{where}.schema"))["grammars"]
        grammars.append({**parts[0], "name": f"schema_{index}"})
        rest, close = (f" {lark_string(part)} " if part else " " for part in (begin[len(trigger) :], end))
        tags.append((lark_string(trigger), f"{rest}@schema_{index}{close}", f"tag_{index}"))
    return free_text_with(tags, grammars)
