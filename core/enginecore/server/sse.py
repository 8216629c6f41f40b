"""Server-sent events, and noticing that a client has gone away."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import TypeVar

from starlette.requests import Request
from starlette.types import Receive, Scope, Send

from enginecore.server.errors import ApiError, ClientGone, as_api_error

logger = logging.getLogger("enginecore.server")
T = TypeVar("T")

#: The last bytes of a stream, given what went wrong after its start (None for nothing).
StreamEnd = Callable[[ApiError | None], bytes]

DONE = b"data: [DONE]\n\n"
_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


def event(body: bytes) -> bytes:
    """One event with JSON data."""
    return b"data: " + body + b"\n\n"


def done(error: ApiError | None) -> bytes:
    """How streams of /v1/completions and /v1/chat/completions end: `[DONE]`, after an error event if there was one."""
    return DONE if error is None else event(error.body()) + DONE


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def unless_gone(request: Request, work: Awaitable[T]) -> T:
    """The result of `work`, which is cancelled when the client hangs up first (ClientGone)."""
    task = asyncio.ensure_future(work)
    watcher = asyncio.ensure_future(_disconnected(request.receive))
    try:
        await asyncio.wait({task, watcher}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientGone
    finally:
        for each in (task, watcher):
            if not each.done():
                each.cancel()
                with contextlib.suppress(asyncio.CancelledError, Exception):
                    await each


class EventStream:
    """A response made of ready-made events. `chunks` is closed when the client hangs up, which aborts the request.

    Each item is written at once, so a step's news for this client is one write. What goes wrong after the start becomes
    what `end` makes of it; `end` ends the stream in any case.
    """

    def __init__(self, first: bytes, chunks: AsyncGenerator[bytes, None], end: StreamEnd = done) -> None:
        self._first = first
        self._chunks = chunks
        self._end = end
        self._gone = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": list(_HEADERS)})
        watcher = asyncio.create_task(_disconnected(receive))
        this = asyncio.current_task()
        assert this is not None

        def hang_up(_: object) -> None:
            self._gone = True
            this.cancel()

        watcher.add_done_callback(hang_up)
        try:
            broken = await self._write(send)
            if broken is not None:
                scope.setdefault("state", {})["broken"] = broken
        except asyncio.CancelledError:
            if not self._gone:
                raise
            raise ClientGone from None
        finally:
            watcher.remove_done_callback(hang_up)
            watcher.cancel()
            await self._chunks.aclose()

    async def _write(self, send: Send) -> ApiError | None:
        """Everything to the end; returns what the stream broke of."""
        answer = None
        await send({"type": "http.response.body", "body": self._first, "more_body": True})
        try:
            async for chunk in self._chunks:
                await send({"type": "http.response.body", "body": chunk, "more_body": True})
            last = self._end(None)
        except Exception as error:
            answer = as_api_error(error)
            if answer is None:
                logger.exception("a stream failed")
                answer = ApiError(500, "internal error")
            last = self._end(answer)
        await send({"type": "http.response.body", "body": last, "more_body": False})
        return answer
