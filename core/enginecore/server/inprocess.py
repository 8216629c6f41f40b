"""Calls of the application without a network: a request goes in as ASGI messages, the answer comes back whole."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any

from starlette.types import ASGIApp, Message

from enginecore.server.errors import JSON


@dataclass(frozen=True, slots=True)
class Reply:
    """An answer: its status, the id that the gate gave the request, the body, and the tokens that it was charged."""

    status: int
    request_id: str
    body: bytes
    prompt_tokens: int
    generated_tokens: int


async def post(app: ASGIApp, path: str, body: bytes) -> Reply:
    """One POST of JSON. Cancelling it aborts the request, as a client's hanging up does."""
    state: dict[str, Any] = {}
    scope = {
        "type": "http", "method": "POST", "path": path, "raw_path": path.encode(), "query_string": b"", "root_path": "",
        "headers": [(b"content-type", JSON.encode()), (b"content-length", b"%d" % len(body))], "http_version": "1.1",
        "scheme": "http", "server": None, "client": None, "asgi": {"version": "3.0"}, "state": state,
    }  # fmt: skip
    unread: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]
    status = 0
    parts: list[bytes] = []

    async def receive() -> Message:
        if not unread:
            await asyncio.Event().wait()  # the client never hangs up
        return unread.pop()

    async def send(message: Message) -> None:
        nonlocal status
        if message["type"] == "http.response.start":
            status = message["status"]
        else:
            parts.append(message.get("body", b""))

    await app(scope, receive, send)
    tally = state.get("tally")
    used = (tally.prompt, tally.generated) if tally is not None else (0, 0)
    return Reply(status, state["request_id"], b"".join(parts), *used)
