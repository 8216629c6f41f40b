"""Answers taken apart by the checkpoint's own response template: transformers' declaration of regions and delimiters.

A template names fields of the message; a field begins with `open` (or a pattern) and ends with `close`; one field
without `open` takes what is in no other. Fields that hold text stream as they come; a region of calls is read when it
closes. A delimiter that may still grow is held back, so a stream gives the same as the whole answer.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import regex

from enginecore.errors import ParameterError
from enginecore.frontend.tools.json_scan import Malformed
from enginecore.frontend.tools.pieces import Piece, PieceKind
from enginecore.frontend.tools.template_values import KNOWN_PARSERS, TIMEOUT_S, calls_of

_KINDS: dict[str, PieceKind] = {
    "content": "text", "reasoning_content": "reasoning", "reasoning": "reasoning", "thinking": "reasoning",
}  # fmt: skip
#: As much of the prompt's end as is looked at for what it has begun.
MAX_PREFIX_CHARS = 4096


@dataclass(frozen=True)
class _Delimiter:
    """`literal`: complete as soon as it is there."""

    pattern: Any
    literal: bool


@dataclass(frozen=True)
class _Field:
    name: str
    spec: dict[str, Any]
    open: _Delimiter | None
    close: _Delimiter | None


class ResponseTemplate:
    """A template, checked and compiled. ParameterError for one that cannot be used."""

    def __init__(self, spec: Any) -> None:
        try:
            fields = {name: _field(name, each) for name, each in spec["fields"].items()}
            self.anchor = _delimiter(spec, "start_anchor", "start_anchor_pattern")
        except (TypeError, KeyError, AttributeError, ValueError, regex.error) as error:
            raise ParameterError(f"the response template cannot be used: {error}", param="response_template") from error
        implicit = [each for each in fields.values() if each.open is None]
        if len(implicit) > 1 or not fields:
            raise ParameterError("the response template must have fields, all but one of them with open",
                                 param="response_template")  # fmt: skip
        self.implicit = implicit[0] if implicit else None
        self.opening = [each for each in fields.values() if each.open is not None]

    def prefix(self, prompt: str) -> str:
        """What of the prompt belongs to the answer already."""
        tail = prompt[-MAX_PREFIX_CHARS:]
        found = list(self.anchor.pattern.finditer(tail, timeout=TIMEOUT_S)) if self.anchor is not None else []
        return tail[found[-1].end() :] if found else ""


def _field(name: str, spec: dict[str, Any]) -> _Field:
    if spec.get("content", "text") not in KNOWN_PARSERS:
        raise ValueError(f"the content {spec['content']!r} of the field {name!r} is not known")
    return _Field(name, spec, _delimiter(spec, "open", "open_pattern"), _delimiter(spec, "close", "close_pattern"))


def _delimiter(spec: dict[str, Any], literal: str, pattern: str) -> _Delimiter | None:
    if pattern in spec:
        return _Delimiter(regex.compile(spec[pattern], regex.DOTALL), False)
    texts = spec.get(literal)
    if texts is None:
        return None
    texts = sorted([texts] if isinstance(texts, str) else texts, key=len, reverse=True)
    alone = not any(a != b and a.startswith(b) for a in texts for b in texts)
    return _Delimiter(regex.compile("|".join(map(regex.escape, texts)), regex.DOTALL), alone)


class TemplateParser:
    """Parses one answer. `prefix` is what the prompt has begun of it."""

    in_call = False

    def __init__(self, template: ResponseTemplate, prefix: str = "", max_calls: int | None = None) -> None:
        self._template = template
        self._max_calls = max_calls
        self._buffer = ""
        self._current = template.implicit
        self._captured: dict[str, str] = {}
        self._raw: list[str] = []  # of a region of calls, its delimiter first
        self._body: list[str] = []
        self._space = ""
        self._leading = True
        self._pieces: list[Piece] = []
        self.num_calls = 0
        if prefix:
            self.feed(prefix)

    def feed(self, text: str) -> list[Piece]:
        self._buffer += text
        return self._advance(at_end=False)

    def finish(self) -> list[Piece]:
        self._advance(at_end=True, keep=True)
        self._close()
        return self._take()

    def _take(self) -> list[Piece]:
        pieces, self._pieces = self._pieces, []
        return pieces

    def _advance(self, *, at_end: bool, keep: bool = False) -> list[Piece]:
        while True:
            found, field, hold = self._next_delimiter(at_end)
            if found is None:
                self._accept(self._buffer[:hold])
                self._buffer = self._buffer[hold:]
                return [] if keep else self._take()
            self._accept(self._buffer[: found.start()])
            empty = found.end() == found.start()
            self._captured = {**self._captured, **{k: v for k, v in found.groupdict().items() if v is not None}}
            opens = field is not self._current
            if not opens:
                self._raw.append(found.group())
            self._close()
            self._buffer = self._buffer[found.end() :]
            if opens:
                self._current = field
                self._captured = {k: v for k, v in found.groupdict().items() if v is not None}
                self._raw = [found.group()]
            if empty and at_end:
                self._buffer = ""

    def _next_delimiter(self, at_end: bool) -> tuple[Any, _Field | None, int]:
        """(match, whose it is, how much of the buffer is certain to be no delimiter)."""
        current, template = self._current, self._template
        watched = []
        if current is not None and current.close is not None:
            watched.append((current, current.close))
        if current is None or current is template.implicit:
            watched += [(field, field.open) for field in template.opening if field.open is not None]
        hold, best, owner = len(self._buffer), None, None
        for field, delimiter in watched:
            try:
                match = delimiter.pattern.search(self._buffer, partial=not at_end, timeout=TIMEOUT_S)
            except TimeoutError:
                continue
            if match is None:
                continue
            grows = match.end() == len(self._buffer) and not delimiter.literal
            if not at_end and (match.partial or grows):
                hold = min(hold, match.start())
            elif best is None or (match.start(), -match.end()) < (best.start(), -best.end()):
                best, owner = match, field
        if best is None or best.start() >= hold:
            return None, None, hold
        return best, owner, hold

    # ---- regions -------------------------------------------------------------------------------------------------

    def _accept(self, text: str) -> None:
        """Text of the current region; in no region it is dropped."""
        if not text or self._current is None:
            return
        kind = _KINDS.get(self._current.name)
        if kind is None:
            self._raw.append(text)
            self._body.append(text)
            return
        if self._leading:
            text = text.lstrip()
            self._leading = not text
        kept = len(text.rstrip())
        if kept:
            self._pieces.append(Piece(kind, self._space + text[:kept]))
            self._space = text[kept:]
        else:
            self._space += text

    def _close(self) -> None:
        field, body = self._current, "".join(self._body)
        if field is not None and field.name == "tool_calls" and self._raw:
            try:
                for name, arguments in calls_of(body, field.spec, self._captured):
                    self.num_calls += 1
                    if self._max_calls is None or self.num_calls <= self._max_calls:
                        self._pieces += [Piece("call", name), Piece("arguments", arguments)]
            except Malformed:
                self._pieces.append(Piece("text", "".join(self._raw)))
        self._current = self._template.implicit
        self._captured, self._raw, self._body, self._space, self._leading = {}, [], [], "", True
