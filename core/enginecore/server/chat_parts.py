"""Answers of chats with more than text in them: the message, and the deltas of a stream, in OpenAI's shapes."""

from __future__ import annotations

from typing import Any

from enginecore.frontend.outputs import CompletionOutput
from enginecore.frontend.tools.answer import PlannedAnswer
from enginecore.frontend.tools.pieces import Piece


def message_of(pieces: list[Piece], answer: PlannedAnswer, echoed: str = "") -> dict[str, Any]:
    """The message that pieces add up to. `content` is null where there are calls and no text.

    The reasoning goes under two names: `reasoning`, and `reasoning_content` for older clients.
    """
    text, reasoning = echoed, ""
    calls: list[dict[str, Any]] = []
    for piece in pieces:
        if piece.kind == "text":
            text += piece.text
        elif piece.kind == "reasoning":
            reasoning += piece.text
        elif piece.kind == "call":
            calls.append(_call(answer.call_id(), piece.text))
        else:
            calls[-1]["function"]["arguments"] += piece.text
    message: dict[str, Any] = {"role": "assistant", "content": text if text or not calls else None, "refusal": None}
    if reasoning:
        message["reasoning"] = message["reasoning_content"] = reasoning
    if calls:
        message["tool_calls"] = calls
    return message


def _call(call_id: str, name: str) -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": ""}}


class ChoiceDeltas:
    """The deltas of one choice of a stream. A call's first delta has its index, id, type and name and no arguments yet;
    those that follow have its index and more of the arguments."""

    def __init__(self, answer: PlannedAnswer) -> None:
        self._answer = answer
        self._index = -1

    @property
    def finish_reason(self) -> str | None:
        return self._answer.finish_reason

    def take(self, output: CompletionOutput) -> list[dict[str, Any]]:
        return [self._delta(piece) for piece in self._answer.feed(output)]

    def _delta(self, piece: Piece) -> dict[str, Any]:
        if piece.kind == "text":
            return {"content": piece.text}
        if piece.kind == "reasoning":
            return {"reasoning": piece.text, "reasoning_content": piece.text}
        if piece.kind == "call":
            self._index += 1
            return {"tool_calls": [{"index": self._index, **_call(self._answer.call_id(), piece.text)}]}
        return {"tool_calls": [{"index": self._index, "function": {"arguments": piece.text}}]}
