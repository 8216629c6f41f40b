"""Answers of /v1/messages: the message, and the events of its stream."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from enginecore.frontend.input_processor import PreparedRequest
from enginecore.frontend.outputs import RequestOutput
from enginecore.server.generation import encode
from enginecore.server.partial_json import arguments_object
from enginecore.server.turn import Piece


def named_event(kind: str, members: dict[str, Any]) -> bytes:
    """An event with its name, and the same name as the `type` of its data."""
    return b"event: " + kind.encode() + b"\ndata: " + encode({"type": kind, **members}) + b"\n\n"


@dataclass(frozen=True, slots=True)
class Cached:
    """What the request asked to keep: the first `tokens` tokens of its prompt, for `ttl`."""

    asked: bool = False
    tokens: int = 0
    ttl: str = "5m"


class Answer:
    """The message that pieces add up to."""

    def __init__(
        self, answer_id: str, model: str, prompt: PreparedRequest, cached: Cached, call_id: Callable[[], str]
    ) -> None:
        self._call_id = call_id
        self._id, self._model, self._prompt, self._cached = answer_id, model, prompt, cached
        self._output: RequestOutput | None = None
        self._blocks: list[tuple[str, list[str]]] = []
        self._names: list[str] = []
        self._finish: str | None = None
        self._stop: int | str | None = None

    def take(self, output: RequestOutput, pieces: Iterable[Piece]) -> None:
        """News about the answer."""
        self._output = output
        for choice in output.outputs:
            self._finish, self._stop = choice.finish_reason, choice.stop_reason
        for piece in pieces:
            if piece.kind == "call":
                self._names.append(piece.text)
                self._blocks.append(("arguments", []))
            elif not self._blocks or self._blocks[-1][0] != piece.kind:
                self._blocks.append((piece.kind, [piece.text]))
            else:
                self._blocks[-1][1].append(piece.text)

    def usage(self) -> dict[str, Any]:
        """Anthropic's figures: the three of input add up to the prompt. Without a cache_control, all is input; with
        one, what the cache held is read and the rest before it is created."""
        assert self._output is not None
        total = len(self._prompt.token_ids)
        read = self._output.num_cached_tokens if self._cached.asked else 0
        created = max(0, self._cached.tokens - read)
        lasting = created if self._cached.ttl == "1h" else 0
        return {
            "input_tokens": total - read - created,
            "cache_creation_input_tokens": created,
            "cache_read_input_tokens": read,
            "cache_creation": {"ephemeral_5m_input_tokens": created - lasting, "ephemeral_1h_input_tokens": lasting},
            "output_tokens": self._output.num_generated_tokens,
            "service_tier": "standard",
        }

    def _reason(self) -> tuple[str | None, str | None]:
        """(stop_reason, stop_sequence)."""
        if self._finish == "length":
            asked = self._prompt.params.max_tokens
            cut = asked is not None and self._prompt.max_tokens < asked
            return "model_context_window_exceeded" if cut else "max_tokens", None
        if isinstance(self._stop, str):
            return "stop_sequence", self._stop
        return "tool_use" if self._names else "end_turn", None

    def _message(self, content: list[dict[str, Any]], reason: tuple[str | None, str | None]) -> dict[str, Any]:
        return {
            "id": self._id,
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "content": content,
            "stop_reason": reason[0],
            "stop_sequence": reason[1],
            "stop_details": None,
            "usage": self.usage(),
        }

    def start(self) -> dict[str, Any]:
        """The message as its stream starts."""
        return self._message([], (None, None))

    def delta(self) -> dict[str, Any]:
        """How and with which figures it ended."""
        reason, sequence = self._reason()
        usage = self.usage()
        for name in ("service_tier", "cache_creation"):
            del usage[name]
        delta = {"stop_reason": reason, "stop_sequence": sequence, "stop_details": None}
        return {"delta": delta, "usage": usage}

    def body(self) -> dict[str, Any]:
        """The whole message."""
        names = iter(self._names)
        content = []
        for kind, parts in self._blocks:
            text = "".join(parts)
            if kind == "arguments":
                content.append(tool_use(self._call_id(), next(names), arguments_object(text)))
            elif kind == "reasoning":
                content.append({"type": "thinking", "thinking": text, "signature": ""})
            elif text:
                content.append({"type": "text", "text": text})
        return self._message(content, self._reason())


def tool_use(call_id: str, name: str, arguments: dict[str, Any]) -> dict[str, Any]:
    """A block that calls a tool. Its id is called as at Anthropic, unless the model's template wants short ones."""
    if call_id.startswith("call_"):
        call_id = "toolu_" + call_id.removeprefix("call_")
    return {"type": "tool_use", "id": call_id, "name": name, "input": arguments}


_STARTS: dict[str, dict[str, Any]] = {
    "text": {"type": "text", "text": ""},
    "reasoning": {"type": "thinking", "thinking": "", "signature": ""},
}
_DELTAS = {
    "text": b'"delta":{"type":"text_delta","text":',
    "reasoning": b'"delta":{"type":"thinking_delta","thinking":',
    "arguments": b'"delta":{"type":"input_json_delta","partial_json":',
}
_DELTA_EVENT = b'event: content_block_delta\ndata: {"type":"content_block_delta","index":%d,'


class BlockEvents:
    """The events of the blocks. A block is opened by the first piece of its kind and closed by one of another."""

    def __init__(self, call_id: Callable[[], str]) -> None:
        self._call_id = call_id
        self._index = -1
        self._kind: str | None = None

    def piece(self, piece: Piece) -> bytes:
        """What to send for a piece."""
        if piece.kind == "call":
            return self._open("arguments", tool_use(self._call_id(), piece.text, {}))
        if not piece.text:
            return b""
        start = b"" if piece.kind == self._kind else self._open(piece.kind, _STARTS[piece.kind])
        head = _DELTA_EVENT % self._index + _DELTAS[piece.kind]
        return b"".join((start, head, encode(piece.text), b"}}\n\n"))

    def _open(self, kind: str, block: dict[str, Any]) -> bytes:
        closing = self.close()
        self._index += 1
        self._kind = kind
        ping = named_event("ping", {}) if self._index == 0 else b""
        opening = named_event("content_block_start", {"index": self._index, "content_block": block})
        return closing + opening + ping

    def close(self) -> bytes:
        """What ends the block that is open, if any."""
        if self._kind is None:
            return b""
        self._kind = None
        return named_event("content_block_stop", {"index": self._index})
