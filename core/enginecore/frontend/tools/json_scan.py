"""JSON that arrives in pieces: where a value ends, and a call's name and arguments as they come.

One pass, a few characters of state; nothing is read twice. Text is taken as it is, not checked: what the model wrote
inside its arguments is passed on in its own words.
"""

from __future__ import annotations

import json
import re

from enginecore.frontend.tools.pieces import Piece

_PLAIN = re.compile(r'[^"\\{}\[\]]*')
_STRING = re.compile(r'[^"\\]*')
_SCALAR_END = re.compile(r"[\s,\]}]")


class Malformed(Exception):
    """This is no call. The scanner's `at` says how far it had read."""


class ValueScanner:
    """Finds the end of one JSON value. The first character decides what it is."""

    __slots__ = ("_depth", "_escaped", "_in_string", "_kind")

    def __init__(self) -> None:
        self._depth = 0
        self._in_string = False
        self._escaped = False
        self._kind = ""

    def feed(self, text: str, start: int) -> tuple[int, bool]:
        """(where the value goes on to in `text`, whether it ends there)."""
        position, end = start, len(text)
        if not self._kind and position < end:
            first = text[position]
            self._kind = "string" if first == '"' else "nested" if first in "{[" else "scalar"
        if self._kind == "scalar":
            found = _SCALAR_END.search(text, position)
            return (found.start(), True) if found else (end, False)
        while position < end:
            if self._escaped:
                self._escaped = False
                position += 1
                continue
            pattern = _STRING if self._in_string else _PLAIN
            position = pattern.match(text, position).end()  # type: ignore[union-attr]
            if position == end:
                break
            char = text[position]
            position += 1
            if char == "\\":
                self._escaped = self._in_string
            elif char == '"':
                self._in_string = not self._in_string
                if not self._in_string and self._kind == "string":
                    return position, True
            elif char in "{[":
                self._depth += 1
            else:
                self._depth -= 1
                if self._depth <= 0:
                    return position, True
        return position, False


class CallScanner:
    """Reads one call object: `{"name": ..., "arguments": {...}}`, in any order, perhaps inside a member "function".

    Pieces come as soon as they are certain: the name once the arguments have begun as an object or as text, arguments
    as they arrive. Raises Malformed while nothing has been given out; later faults end the call.
    """

    def __init__(self, name_keys: tuple[str, ...], arguments_keys: tuple[str, ...], known: frozenset[str] | None):
        self._name_keys, self._arguments_keys = name_keys, arguments_keys
        self._known = known
        self._name: str | None = None
        self._arguments: list[str] | None = None
        self._begun = False
        self._first = ""
        self._parts: list[str] = []
        self._levels = 0
        self._key = ""
        self._value: ValueScanner | None = None
        self._expect = "open"
        self._has_arguments = False
        self.at = 0
        self.done = False

    @property
    def begun(self) -> bool:
        """Whether a piece has been given out."""
        return self._begun

    def feed(self, text: str, start: int) -> tuple[list[Piece], int]:
        """(pieces, where in `text` to go on). `done` turns True at the object's end."""
        pieces: list[Piece] = []
        position = start
        while position < len(text) and not self.done:
            if self._value is not None:
                position = self._take_value(text, position, pieces)
                continue
            char = text[position]
            if char.isspace():
                position += 1
                continue
            position = self._take_mark(text, position, char)
        return pieces, position

    def _take_mark(self, text: str, position: int, char: str) -> int:
        """Punctuation between members."""
        self.at = position
        if self._expect == "open" and char == "{":
            self._levels, self._expect = 1, "key"
        elif self._expect in ("key", "comma") and char == "}":
            self._levels -= 1
            self._expect = "comma"
            if not self._levels:
                self._end()
        elif self._expect == "comma" and char == ",":
            self._expect = "key"
        elif self._expect == "key" and char == '"':
            self._expect = "key text"
            return self._begin_value(position)
        elif self._expect == "colon" and char == ":":
            self._expect = "value"
        elif self._expect == "value":
            if self._key == "function" and char == "{" and self._levels == 1:
                self._levels, self._expect = 2, "key"
            else:
                return self._begin_value(position)
        elif self._begun:
            self.done = True
            return position
        else:
            raise Malformed
        return position + 1

    def _take_value(self, text: str, position: int, pieces: list[Piece]) -> int:
        """More of a key or of a member's value."""
        assert self._value is not None
        end, complete = self._value.feed(text, position)
        part = text[position:end]
        self.at = end
        is_arguments = self._expect == "value" and self._key in self._arguments_keys and not self._has_arguments
        self._first = self._first or part[:1]
        if is_arguments and self._first == "{":
            self._add_arguments(part, pieces)
        else:
            self._parts.append(part)
        if complete:
            self._value = None
            value = "".join(self._parts)
            if self._expect == "key text":
                self._key, self._expect = _string(value), "colon"
            else:
                self._take_member(is_arguments, value, pieces)
                self._expect = "comma"
        return end

    def _begin_value(self, position: int) -> int:
        self._value, self._first, self._parts = ValueScanner(), "", []
        return position

    def _take_member(self, is_arguments: bool, value: str, pieces: list[Piece]) -> None:
        self._has_arguments = self._has_arguments or is_arguments
        if is_arguments and self._first == "{":
            pass
        elif is_arguments:
            if self._first == '"':  # arguments as text that holds JSON
                self._add_arguments(_string(value), pieces)
            elif value in ("null", "None"):
                self._add_arguments("{}", pieces)
            else:
                self._fail()
        elif self._key in self._name_keys and self._first == '"' and self._name is None:
            self._name = _string(value)
            if not self._name or (self._known is not None and self._name not in self._known):
                self._name = None
                self._fail()
            if self._arguments is not None:
                early, self._arguments = self._arguments, None
                for part in early:
                    self._add_arguments(part, pieces)

    def _add_arguments(self, part: str, pieces: list[Piece]) -> None:
        if self._name is None:
            self._arguments = [*(self._arguments or []), part]
            return
        if not self._begun:
            self._begun = True
            pieces.append(Piece("call", self._name))
        pieces.append(Piece("arguments", part))

    def _fail(self) -> None:
        if not self._begun:
            raise Malformed

    def _end(self) -> None:
        self.done = True
        if not self._begun and self._name is None:
            raise Malformed

    def last(self) -> list[Piece]:
        """After the end: a call without any arguments."""
        if self._begun or self._name is None:
            return []
        self._begun = True
        return [Piece("call", self._name), Piece("arguments", "{}")]


def _string(raw: str) -> str:
    try:
        value = json.loads(raw, strict=False)
    except ValueError:
        value = raw[1:-1]
    return value if isinstance(value, str) else str(value)


def skip_space(text: str, start: int) -> int:
    position = start
    while position < len(text) and text[position].isspace():
        position += 1
    return position
