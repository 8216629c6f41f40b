"""What an answer is made of."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

PieceKind = Literal["text", "reasoning", "call", "arguments"]


@dataclass(slots=True)
class Piece:
    """A part of an answer. A call's name comes in a piece of its own, the text of its arguments in those that
    follow."""

    kind: PieceKind
    text: str


class AnswerParser(Protocol):
    """Takes an answer apart as it arrives. Fed whole or in any slices, the pieces add up to the same."""

    @property
    def num_calls(self) -> int:
        """Calls that have begun."""

    @property
    def in_call(self) -> bool:
        """Whether the last of them has not ended."""

    def feed(self, text: str) -> list[Piece]:
        """More of the answer; what is certain by now."""

    def finish(self) -> list[Piece]:
        """The answer is over: what was held back."""


def merged(pieces: list[Piece]) -> list[Piece]:
    """The same with neighbours of one kind joined (calls apart). Empty texts are dropped."""
    result: list[Piece] = []
    for piece in pieces:
        if not piece.text and piece.kind != "call":
            continue
        if result and piece.kind == result[-1].kind and piece.kind != "call":
            result[-1].text += piece.text
        else:
            result.append(Piece(piece.kind, piece.text))
    return result
