"""Calls that are not written as JSON objects: a name and then JSON, Python's notation, and tags.

Each scanner has the interface of `json_scan.CallScanner`: `feed` gives pieces and how far it has read, `begun` says
whether a piece was given out, `done` whether the call is over, `at` how far it had read when it raised Malformed.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable
from typing import Any

from enginecore.frontend.stop import StopAutomaton
from enginecore.frontend.tools.json_scan import Malformed, ValueScanner, skip_space
from enginecore.frontend.tools.marks import MarkFinder
from enginecore.frontend.tools.pieces import Piece

_NAME = re.compile(r"\w[\w.:/\-]*")
#: A call in Python's notation is parsed at once; a longer one is no call.
MAX_PYTHONIC_CHARS = 200_000
MAX_NAME_CHARS = 256


class NamedScanner:
    """`NAME mark {arguments}`. A mark "{" is the start of the arguments itself; after any other mark but the last of
    `name_ends`, text up to the arguments (an id of the call) is passed over."""

    def __init__(self, name_ends: StopAutomaton) -> None:
        self._finder = MarkFinder(name_ends)
        self._name = ""
        self._value: ValueScanner | None = None
        self._named = False
        self.begun = self.done = False
        self.at = 0

    def feed(self, text: str, start: int) -> tuple[list[Piece], int]:
        pieces: list[Piece] = []
        position = start
        if not self._named:
            passed, mark, position = self._finder.feed(text, position)
            self._name += passed
            self.at = position
            if len(self._name) > MAX_NAME_CHARS:
                raise Malformed
            if mark is None:
                return pieces, position
            self._named = True
            if not _NAME.fullmatch(self._name.strip()):
                self._name += mark
                raise Malformed
            if mark == "{":
                position = self._begin(pieces, "{", position)
                assert self._value is not None
                self._value.feed("{", 0)
        if self._value is None:
            position = self._seek_arguments(text, position, pieces)
        if self._value is not None and position < len(text):
            end, self.done = self._value.feed(text, position)
            pieces.append(Piece("arguments", text[position:end]))
            position = end
        return pieces, position

    def _seek_arguments(self, text: str, position: int, pieces: list[Piece]) -> int:
        found = text.find("{", position)
        if found < 0:
            return len(text)
        return self._begin(pieces, "", found)

    def _begin(self, pieces: list[Piece], first: str, position: int) -> int:
        self._value, self.begun = ValueScanner(), True
        pieces += [Piece("call", self._name.strip()), Piece("arguments", first)]
        return position

    def last(self) -> list[Piece]:
        return []


class PythonicScanner:
    """`name(key=value, ...)`, taken whole at its closing bracket: values are turned from Python's notation to JSON."""

    def __init__(self, known: frozenset[str] | None) -> None:
        self._known = known
        self._text: list[str] = []
        self._length = 0
        self._depth = 0
        self._quote = ""
        self._escaped = False
        self.begun = self.done = False
        self.at = 0

    def feed(self, text: str, start: int) -> tuple[list[Piece], int]:
        for position in range(start, len(text)):
            if self._ends(text[position]):
                self._text.append(text[start : position + 1])
                self.at, self.done = position + 1, True
                pieces = self._parse()
                self.begun = True
                return pieces, position + 1
        self.at = len(text)
        self._text.append(text[start:])
        self._length += len(text) - start
        if self._length > MAX_PYTHONIC_CHARS:
            raise Malformed
        return [], len(text)

    def _ends(self, char: str) -> bool:
        if self._escaped:
            self._escaped = False
        elif self._quote:
            if char == "\\":
                self._escaped = True
            elif char == self._quote:
                self._quote = ""
        elif char in "\"'":
            self._quote = char
        elif char in "([{":
            self._depth += 1
        elif char in ")]}":
            self._depth -= 1
            return self._depth <= 0
        return False

    def _parse(self) -> list[Piece]:
        try:
            ((name, values),) = python_calls("".join(self._text))
            text = json.dumps(values, ensure_ascii=False, allow_nan=False)
        except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError) as error:
            raise Malformed from error
        if self._known is not None and name not in self._known:
            raise Malformed
        return [Piece("call", name), Piece("arguments", text)]

    def last(self) -> list[Piece]:
        return []


def python_calls(text: str) -> list[tuple[str, dict[str, Any]]]:
    """(name, arguments) of a call, or of a list of calls, in Python's notation. Raises what parsing it raises."""
    body = ast.parse(text.strip(), mode="eval").body
    found = []
    for call in body.elts if isinstance(body, ast.List) else [body]:
        if not isinstance(call, ast.Call) or call.args or any(keyword.arg is None for keyword in call.keywords):
            raise ValueError("not a call with keywords")
        arguments = {str(keyword.arg): _literal(keyword.value) for keyword in call.keywords}
        found.append((ast.unparse(call.func), arguments))
    return found


def _literal(node: ast.expr) -> Any:
    """A literal's value; JSON's words for true, false and null are taken too."""
    if isinstance(node, ast.Name) and node.id in ("true", "false", "null"):
        return {"true": True, "false": False, "null": None}[node.id]
    if isinstance(node, ast.Dict):
        pairs = zip(node.keys, node.values, strict=True)
        return {str(_literal(key)) if key else "": _literal(value) for key, value in pairs}
    if isinstance(node, (ast.List, ast.Tuple)):
        return [_literal(each) for each in node.elts]
    return ast.literal_eval(node)


_PARAMETER, _FUNCTION_END = "<parameter=", "</function>"


class XmlScanner:
    """`<function=NAME> <parameter=KEY> VALUE </parameter> ... </function>`. A value is text; `convert` (function, key,
    text) makes of it what the function's schema wants."""

    def __init__(self, convert: Callable[[str, str, str], Any]) -> None:
        self._convert = convert
        self._state = "<function="
        self._finder = MarkFinder(StopAutomaton([self._state]))
        self._name = self._key = ""
        self._buffer: list[str] = []
        self._length = 0
        self._count = 0
        self.begun = self.done = False
        self.at = 0

    def feed(self, text: str, start: int) -> tuple[list[Piece], int]:
        pieces: list[Piece] = []
        position = start
        while position < len(text) and not self.done:
            passed, mark, position = self._finder.feed(text, position)
            self._buffer.append(passed)
            self._length += len(passed)
            self.at = position
            if self._state == "<function=" and passed.strip():
                raise Malformed
            if self._state in (">", "key>") and self._length > MAX_NAME_CHARS:
                self._break()
            if mark is not None:
                self._advance(mark, pieces)
        return pieces, position

    def _advance(self, mark: str, pieces: list[Piece]) -> None:
        found, self._buffer, self._length = "".join(self._buffer), [], 0
        if self._state == "<function=":
            self._expect(">", ">")
        elif self._state == ">":
            self._name = found.strip().strip("\"'")
            if not _NAME.fullmatch(self._name):
                raise Malformed
            self.begun = True
            pieces.append(Piece("call", self._name))
            self._expect("parameter", _PARAMETER, _FUNCTION_END)
        elif mark == _PARAMETER:
            self._expect("key>", ">")
        elif mark == _FUNCTION_END:
            pieces.append(Piece("arguments", "}" if self._count else "{}"))
            self.done = True
        elif self._state == "key>":
            self._key = found.strip().strip("\"'")
            self._expect("value", "</parameter>")
        else:
            value = json.dumps(self._convert(self._name, self._key, _trimmed(found)), ensure_ascii=False)
            pieces.append(
                Piece(
                    "arguments", f"{', ' if self._count else '{'}{json.dumps(self._key, ensure_ascii=False)}: {value}"
                )
            )
            self._count += 1
            self._expect("parameter", _PARAMETER, _FUNCTION_END)

    def _expect(self, state: str, *marks: str) -> None:
        self._state, self._finder = state, MarkFinder(StopAutomaton(marks))

    def _break(self) -> None:
        if not self.begun:
            raise Malformed
        self.done = True

    def last(self) -> list[Piece]:
        return []


def _trimmed(text: str) -> str:
    """Without the one line break on either side that the notation puts there."""
    text = text[1:] if text.startswith("\n") else text
    return text[:-1] if text.endswith("\n") else text


def converter(tools: list[dict[str, Any]]) -> Callable[[str, str, str], Any]:
    """Values of tagged parameters as their schemas want them; what does not fit stays text."""
    types: dict[tuple[str, str], set[str]] = {}
    for tool in tools:
        function = tool.get("function") or {}
        properties = (function.get("parameters") or {}).get("properties")
        for key, schema in properties.items() if isinstance(properties, dict) else ():
            types[function.get("name", ""), key] = _types(schema)

    def convert(name: str, key: str, text: str) -> Any:
        wanted = types.get((name, key), set())
        if wanted == {"string"} or (not wanted and (name, key) in types):
            return text
        try:
            value = json.loads(text)
        except (ValueError, RecursionError):
            return {"True": True, "False": False, "None": None}.get(text.strip(), text) if wanted else text
        fits = {"string": str, "integer": int, "number": (int, float), "boolean": bool, "object": dict, "array": list,
                "null": type(None)}  # fmt: skip
        if not wanted or any(isinstance(value, fits[kind]) for kind in wanted if kind in fits):  # type: ignore[arg-type]
            return value
        return text

    return convert


def _types(schema: Any) -> set[str]:
    if not isinstance(schema, dict):
        return set()
    kind = schema.get("type")
    kinds = {kind} if isinstance(kind, str) else set(kind) if isinstance(kind, list) else set()
    for name in ("anyOf", "oneOf"):
        for each in schema.get(name) or ():
            kinds |= _types(each)
    return kinds


__all__ = ["NamedScanner", "PythonicScanner", "XmlScanner", "converter", "skip_space"]
