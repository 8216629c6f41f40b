"""A response of /v1/responses as it grows: the object, and the events of its stream."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from enginecore.frontend.outputs import RequestOutput
from enginecore.server.errors import ApiError
from enginecore.server.generation import encode
from enginecore.server.responses_convert import new_id
from enginecore.server.responses_protocol import ResponsesRequest
from enginecore.server.turn import Piece, Turn

_PART_TYPES = {"text": "output_text", "reasoning": "reasoning_text"}


def response_object(turn: Turn, body: ResponsesRequest, response_id: str) -> dict[str, Any]:
    """The response before anything was said."""
    reasoning = body.reasoning or {}
    return {
        "id": response_id,
        "object": "response",
        "created_at": int(time.time()),
        "completed_at": None,
        "status": "queued" if body.background else "in_progress",
        "background": body.background,
        "error": None,
        "incomplete_details": None,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "max_tool_calls": body.max_tool_calls,
        "metadata": body.metadata or {},
        "model": turn.model,
        "output": [],
        "parallel_tool_calls": body.parallel_tool_calls,
        "previous_response_id": body.previous_response_id,
        "prompt_cache_key": body.prompt_cache_key,
        "reasoning": {"effort": reasoning.get("effort"), "summary": reasoning.get("summary")},
        "safety_identifier": body.safety_identifier,
        "service_tier": "default",
        "store": body.store,
        "temperature": turn.params.temperature,
        "text": {"format": (body.text or {}).get("format") or {"type": "text"}, "verbosity": "medium"},
        "tool_choice": body.tool_choice or "auto",
        "tools": [{"parameters": None, "strict": None, **tool} for tool in body.tools or []],
        "top_logprobs": body.top_logprobs or 0,
        "top_p": turn.params.top_p,
        "truncation": body.truncation,
        "usage": None,
        "user": body.user,
    }


class ResponseWriter:
    """Grows `response` by pieces. Every method returns the events that tell of it; a plain answer drops them."""

    def __init__(self, turn: Turn, response: dict[str, Any], call_id: Callable[[], str]) -> None:
        self.response = response
        self._call_id = call_id
        self._turn = turn
        self._sequence = 0
        self._item: dict[str, Any] | None = None
        self._kind = ""
        self._parts: list[str] = []
        self._logprobs: list[dict[str, Any]] = []
        self._unsent_logprobs: list[dict[str, Any]] = []
        self._delta_head = b""
        self._usage: tuple[int, int, int] | None = None
        self._length = False

    def _event(self, kind: str, **members: Any) -> bytes:
        body = encode({"type": kind, **members, "sequence_number": self._sequence})
        self._sequence += 1
        return b"event: " + kind.encode() + b"\ndata: " + body + b"\n\n"

    def _status(self, status: str, event: str | None = None) -> bytes:
        self.response["status"] = status
        return self._event(f"response.{event or status}", response=self.response)

    def start(self) -> bytes:
        """The response is accepted."""
        queued = self.response["status"] == "queued"
        return self._event("response.created", response=self.response) + (self._status("queued") if queued else b"")

    def progress(self) -> bytes:
        """The engine has begun."""
        return self._status("in_progress")

    def take(self, output: RequestOutput, pieces: Iterable[Piece], logprobs: Sequence[dict[str, Any]] = ()) -> bytes:
        """News. `logprobs` are entries for the tokens that made the pieces, which then are text only."""
        self._usage = (len(output.prompt_token_ids), output.num_cached_tokens, output.num_generated_tokens)
        self._length = any(choice.finish_reason == "length" for choice in output.outputs)
        self._unsent_logprobs += logprobs
        return b"".join(self._piece(piece) for piece in pieces)

    def _piece(self, piece: Piece) -> bytes:
        if piece.kind == "call":
            return self._open_call(piece.text)
        if not piece.text and not (piece.kind == "text" and self._unsent_logprobs):
            return b""
        start = b""
        if piece.kind != self._kind:
            if piece.kind == "arguments":
                return b""
            start = self._open_text(piece.kind)
        self._parts.append(piece.text)
        extra = b""
        if piece.kind == "text":
            extra = b',"logprobs":' + (encode(self._unsent_logprobs) if self._unsent_logprobs else b"[]")
            self._logprobs += self._unsent_logprobs
            self._unsent_logprobs = []
        tail = b',"sequence_number":%d}\n\n' % self._sequence
        self._sequence += 1
        return b"".join((start, self._delta_head, encode(piece.text), extra, tail))

    def _open(self, kind: str, item: dict[str, Any]) -> tuple[bytes, int]:
        closing = self._close("completed")
        index = len(self.response["output"])
        self._item, self._kind, self._parts, self._logprobs = item, kind, [], []
        return closing + self._event("response.output_item.added", output_index=index, item=item), index

    def _head(self, kind: str, index: int, place: bytes) -> bytes:
        assert self._item is not None
        name = f"response.{kind}.delta".encode()
        ids = b'"item_id":' + encode(self._item["id"]) + b',"output_index":%d' % index
        return b"event: " + name + b'\ndata: {"type":"' + name + b'",' + ids + place + b',"delta":'

    def _open_text(self, kind: str) -> bytes:
        item: dict[str, Any] = {"id": new_id("msg"), "type": "message", "status": "in_progress", "role": "assistant"}
        if kind == "reasoning":
            item = {"id": new_id("rs"), "type": "reasoning", "status": "in_progress", "summary": []}
        item["content"] = []
        news, index = self._open(kind, item)
        self._delta_head = self._head(_PART_TYPES[kind], index, b',"content_index":0')
        place = {"item_id": item["id"], "output_index": index, "content_index": 0}
        return news + self._event("response.content_part.added", **place, part=self._part(kind, ""))

    def _open_call(self, name: str) -> bytes:
        item = {"id": new_id("fc"), "type": "function_call", "status": "in_progress", "call_id": self._call_id(),
                "name": name, "arguments": ""}  # fmt: skip
        news, index = self._open("arguments", item)
        self._delta_head = self._head("function_call_arguments", index, b"")
        return news

    def _part(self, kind: str, text: str) -> dict[str, Any]:
        if kind == "reasoning":
            return {"type": "reasoning_text", "text": text}
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": list(self._logprobs)}

    def _close(self, status: str) -> bytes:
        """End the item that is open, if any."""
        if self._unsent_logprobs and self._kind == "text":
            return self._piece(Piece("text", "")) + self._close(status)  # of tokens that show nothing, as the last one
        item, kind = self._item, self._kind
        if item is None:
            return b""
        self._item, self._kind = None, ""
        text = "".join(self._parts)
        index = len(self.response["output"])
        place = {"item_id": item["id"], "output_index": index}
        if kind == "arguments":
            item["arguments"] = text
            news = self._event("response.function_call_arguments.done", **place, name=item["name"], arguments=text)
        else:
            part = self._part(kind, text)
            item["content"] = [part]
            place["content_index"] = 0
            more = {"logprobs": part["logprobs"]} if kind == "text" else {}
            news = self._event(f"response.{_PART_TYPES[kind]}.done", **place, text=text, **more)
            news += self._event("response.content_part.done", **place, part=part)
        item["status"] = status
        self.response["output"].append(item)
        return news + self._event("response.output_item.done", output_index=index, item=item)

    def finish(self) -> bytes:
        """The model has ended."""
        status = "incomplete" if self._length else "completed"
        news = self._close(status)
        if self._length:
            self.response["incomplete_details"] = {"reason": "max_output_tokens"}
        else:
            self.response["completed_at"] = int(time.time())
        self.response["usage"] = self.usage()
        return news + self._status(status)

    def fail(self, error: ApiError) -> bytes:
        """Something went wrong in the middle."""
        self._close("incomplete")
        code = "rate_limit_exceeded" if error.status == 429 else "server_error"
        self.response["error"] = {"code": code, "message": error.message}
        return self._status("failed")

    def cancel(self) -> None:
        """The client asked for it; what was said so far is kept."""
        self._close("incomplete")
        self.response["status"] = "cancelled"

    def usage(self) -> dict[str, Any] | None:
        """The figures so far. Whole blocks that the cache did not hold were written to it."""
        if self._usage is None:
            return None
        prompt, cached, generated = self._usage
        config = self._turn.state.llm.config
        written = prompt - prompt % config.block_size - cached if config.enable_prefix_caching else 0
        thoughts = [part["text"] for item in self.response["output"] if item["type"] == "reasoning"
                    for part in item["content"]]  # fmt: skip
        encode_text = self._turn.state.llm.tokenizer.encode
        reasoning = sum(len(encode_text(text, add_special_tokens=False)) for text in thoughts)
        return {
            "input_tokens": prompt,
            "input_tokens_details": {"cached_tokens": cached, "cache_write_tokens": max(0, written)},
            "output_tokens": generated,
            "output_tokens_details": {"reasoning_tokens": min(reasoning, generated)},
            "total_tokens": prompt + generated,
        }
