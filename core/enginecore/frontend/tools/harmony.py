"""Answers in channels, as gpt-oss writes them (OpenAI's harmony format).

    <|channel|>analysis<|message|>...<|end|>
    <|start|>assistant<|channel|>commentary to=functions.f<|message|>{...}<|call|>

A message's header names its channel and perhaps a function. Analysis is reasoning, a message to a function is a call,
everything else is text.
"""

from __future__ import annotations

import re

from enginecore.frontend.stop import StopAutomaton
from enginecore.frontend.tools.marks import MarkFinder
from enginecore.frontend.tools.pieces import Piece, PieceKind

_CHANNEL, _MESSAGE, _START = "<|channel|>", "<|message|>", "<|start|>"
_ENDS = ("<|end|>", "<|call|>", "<|return|>")
_RECIPIENT = re.compile(r"to=(?:functions\.)?(\w[\w.:/\-]*)")
_MARKS = StopAutomaton([_CHANNEL, _MESSAGE, _START, "<|constrain|>", *_ENDS])
MAX_HEADER_CHARS = 1024


class HarmonyParser:
    """Parses one answer. An answer that begins without a header, because the prompt has one, is `first` or text."""

    def __init__(self, max_calls: int | None = None, first: PieceKind = "text") -> None:
        self._finder = MarkFinder(_MARKS)
        self._header: list[str] | None = None
        self._kind: PieceKind | None = first
        self._max_calls = max_calls
        self.num_calls = 0

    @property
    def in_call(self) -> bool:
        """Never said: the token that ends a call ends the answer, and has no text."""
        return False

    def feed(self, text: str) -> list[Piece]:
        pieces: list[Piece] = []
        position = 0
        while position < len(text):
            passed, mark, position = self._finder.feed(text, position)
            self._pass(passed, pieces)
            if mark == _MESSAGE:
                self._open(pieces)
            elif mark in (_CHANNEL, _START):
                self._header = [*(self._header or []), " "]
            elif mark in _ENDS:
                self._header, self._kind = [], None
        return pieces

    def finish(self) -> list[Piece]:
        pieces: list[Piece] = []
        self._pass(self._finder.finish(), pieces)
        return pieces

    def _pass(self, text: str, pieces: list[Piece]) -> None:
        if not text:
            return
        if self._header is not None:
            if len(self._header) < MAX_HEADER_CHARS:
                self._header.append(text)
        elif self._kind is not None:
            pieces.append(Piece(self._kind, text))

    def _open(self, pieces: list[Piece]) -> None:
        """A header is complete, its message begins."""
        header, self._header = "".join(self._header or [])[:MAX_HEADER_CHARS], None
        recipient = _RECIPIENT.search(header)
        if recipient is not None:
            self.num_calls += 1
            kept = self._max_calls is None or self.num_calls <= self._max_calls
            self._kind = "arguments" if kept else None
            if kept:
                pieces.append(Piece("call", recipient.group(1)))
        else:
            self._kind = "reasoning" if "analysis" in header.split() else "text"
