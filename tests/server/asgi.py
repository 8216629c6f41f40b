"""Drive an ASGI application by hand: bodies in pieces, slow readers, clients that hang up."""

from __future__ import annotations

import asyncio
import json
from typing import Any


class Exchange:
    """One request. Start it with `start`, take what was sent from `sent`, hang up with `hang_up`."""

    def __init__(
        self, app: Any, path: str, body: Any = None, *, method: str = "POST", headers: list[tuple[bytes, bytes]] | None
        = None, pieces: list[bytes] | None = None,
    ) -> None:  # fmt: skip
        self._app = app
        raw = b"" if body is None else json.dumps(body).encode()
        self._pieces = [raw] if pieces is None else list(pieces)
        self.scope = {
            "type": "http", "method": method, "path": path, "raw_path": path.encode(), "query_string": b"", "root_path":
            "", "headers": [(b"content-type", b"application/json"), *(headers or [])], "http_version": "1.1", "scheme":
            "http", "server": ("toy", 80), "client": ("1.2.3.4", 5), "asgi": {"version": "3.0"},
        }  # fmt: skip
        self.sent: list[dict[str, Any]] = []
        self._gone = asyncio.Event()
        self.gate = asyncio.Event()
        self.gate.set()
        self._arrived = asyncio.Event()
        self.task: asyncio.Task[None] | None = None

    def start(self) -> Exchange:
        self.task = asyncio.create_task(self._app(self.scope, self._receive, self._send))
        return self

    async def run(self) -> tuple[int, bytes]:
        self.start()
        assert self.task is not None
        await asyncio.wait_for(self.task, 20)
        return self.status, self.body

    async def _receive(self) -> dict[str, Any]:
        if self._pieces:
            piece = self._pieces.pop(0)
            return {"type": "http.request", "body": piece, "more_body": bool(self._pieces)}
        await self._gone.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: dict[str, Any]) -> None:
        await self.gate.wait()
        if not self._gone.is_set():
            self.sent.append(message)
            self._arrived.set()

    def hang_up(self) -> None:
        self._gone.set()

    async def wait_for(self, count: int) -> None:
        """Until `count` messages were sent."""
        while len(self.sent) < count:
            self._arrived.clear()
            await asyncio.wait_for(self._arrived.wait(), 20)

    @property
    def status(self) -> int:
        return int(self.sent[0]["status"])

    @property
    def headers(self) -> dict[bytes, bytes]:
        return dict(self.sent[0]["headers"])

    @property
    def body(self) -> bytes:
        return b"".join(message.get("body", b"") for message in self.sent[1:])
