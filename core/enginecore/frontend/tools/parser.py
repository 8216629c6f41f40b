"""An answer taken apart into text and calls of functions, as it arrives.

Every decision is made on what has arrived up to the character that makes it certain, whatever the slices were; so a
stream gives the same as the whole answer at once. Nothing is read twice, so the work is linear in the answer.

What begins like a call and is none becomes text again, to the letter. Whitespace around calls is dropped; other text is
untouched.
"""

from __future__ import annotations

from typing import Any

from enginecore.frontend.stop import StopAutomaton
from enginecore.frontend.tools.formats import ToolFormat
from enginecore.frontend.tools.json_scan import CallScanner, Malformed, skip_space
from enginecore.frontend.tools.marks import MarkFinder
from enginecore.frontend.tools.other_scan import NamedScanner, PythonicScanner, XmlScanner, converter
from enginecore.frontend.tools.pieces import Piece

Scanner = CallScanner | NamedScanner | PythonicScanner | XmlScanner


class ToolParser:
    """Parses one answer in one format. `tools` are the request's; `max_calls` drops calls beyond so many. With
    `only_calls`, for an answer that was forced to be calls, what is left of one that was cut off is no text."""

    def __init__(
        self, style: ToolFormat, tools: list[dict[str, Any]], max_calls: int | None = None, *, only_calls: bool = False
    ) -> None:
        self._only_calls = only_calls
        self._style = style
        self._known = frozenset(str((tool.get("function") or {}).get("name")) for tool in tools)
        self._tools = tools
        self._max_calls = max_calls
        self._marks = StopAutomaton([*style.opens, *style.closes, *style.ignored])
        self._name_ends = StopAutomaton(style.name_ends)
        self._finder = MarkFinder(self._marks)
        self._state = "start"
        self._raw: list[str] = []  # what may turn out to be no call
        self._space = ""  # whitespace that is dropped if a call comes next
        self._scanner: Scanner | None = None
        self._in_list = False
        self._marked = False
        self._after_call = False
        self._pieces: list[Piece] = []
        self.num_calls = 0

    @property
    def in_call(self) -> bool:
        """Whether a call has begun and not ended."""
        return self._scanner is not None and self._scanner.begun

    # ---- in and out ----------------------------------------------------------------------------------------------

    def feed(self, text: str) -> list[Piece]:
        position = 0
        while position < len(text):
            position = getattr(self, f"_in_{self._state}")(text, position)
        return self._take()

    def finish(self) -> list[Piece]:
        """Also of an answer that was cut off: a call that has begun stays one."""
        if self._state == "text":
            self._text(self._finder.finish())
        elif self._scanner is None or not self._scanner.begun:
            self._text("".join(self._raw))
        if self._space and not self.num_calls and not self._only_calls:
            self._pieces.append(Piece("text", self._space))
        self._state, self._raw, self._space = "text", [], ""
        return self._take()

    def _take(self) -> list[Piece]:
        pieces, self._pieces = self._pieces, []
        return pieces

    def _text(self, text: str) -> None:
        """Text goes out, but for whitespace at its end."""
        kept = 0 if self._only_calls else len(text.rstrip())
        if kept:
            self._pieces.append(Piece("text", self._space + text[:kept]))
            self._after_call = False
            self._space = text[kept:]
        else:
            self._space += text

    def _no_call(self, more: str) -> None:
        raw, self._raw, self._scanner, self._in_list = "".join(self._raw) + more, [], None, False
        self._state = "text"
        self._text(raw)

    # ---- states: each takes text from a position on and returns where to go on --------------------------------------

    def _in_start(self, text: str, position: int) -> int:
        """Nothing has come yet, or only calls: the answer may be a call without a mark before it."""
        end = skip_space(text, position)
        self._raw.append(text[position:end])
        if end == len(text):
            return end
        self._marked = False
        if text[end] in self._style.bare:
            self._state = "body"
        else:
            self._space, self._raw, self._state = self._space + "".join(self._raw), [], "text"
        return end

    def _in_text(self, text: str, position: int) -> int:
        passed, mark, position = self._finder.feed(text, position)
        self._text(passed)
        if mark is None:
            return position
        if mark in self._style.opens:
            self._raw, self._marked, self._state = [mark], True, "body"
        elif mark in self._style.closes and not self._after_call:
            self._text(mark)
        elif mark in self._style.closes:
            self._state = "start"
        return position

    def _in_body(self, text: str, position: int) -> int:
        """After an opening mark: what kind of call, or a list of calls?"""
        end = skip_space(text, position)
        self._raw.append(text[position:end])
        if end == len(text):
            return end
        char, layout = text[end], self._style.layout
        if char == "[" and not self._in_list:
            self._in_list = True
            self._raw.append(char)
            return end + 1
        known = None if self._marked else self._known
        if char == "{":
            self._scanner = CallScanner(self._style.name_keys, self._style.arguments_keys, known)
        elif layout == "xml":
            self._scanner = XmlScanner(converter(self._tools))
        elif layout == "pythonic":
            self._scanner = PythonicScanner(known)
        elif self._style.name_ends and not self._in_list:
            self._scanner = NamedScanner(self._name_ends)
        else:
            self._no_call("")
            return end
        self._state = "call"
        return end

    def _in_call(self, text: str, position: int) -> int:
        scanner = self._scanner
        assert scanner is not None
        try:
            pieces, end = scanner.feed(text, position)
        except Malformed:
            self._no_call(text[position : scanner.at])
            return scanner.at
        if scanner.done:
            pieces += scanner.last()
        if scanner.begun:
            self._raw, self._space = [], ""
            self._give(pieces)
        else:
            self._raw.append(text[position:end])
        if scanner.done:
            self._scanner, self._after_call = None, True
            self._state = "between" if self._in_list else "text"
        return end

    def _give(self, pieces: list[Piece]) -> None:
        self.num_calls += sum(piece.kind == "call" for piece in pieces)
        if self._max_calls is None or self.num_calls <= self._max_calls:
            self._pieces += pieces

    def _in_between(self, text: str, position: int) -> int:
        """After a call of a list."""
        end = skip_space(text, position)
        if end == len(text):
            return end
        if text[end] == ",":
            self._state = "body"
            return end + 1
        self._in_list, self._state = False, "text"
        return end + 1 if text[end] == "]" else end
