"""OpenAI's batch files: a request a line goes in, an answer a line comes out, in whatever order they are ready.

A line in:  {"custom_id": TEXT, "method": "POST", "url": "/v1/...", "body": {...}}
A line out: {"id", "custom_id", "response": {"status_code", "request_id", "body"}, "error": null}
            with "response": null and "error": {"code", "message", "param", "line"} for a line that is no request

Requests go through the application itself, so every POST route is there and answers as over HTTP. A number of workers
take lines as they become free: what is read ahead is never more than what is in flight.
"""

from __future__ import annotations

import asyncio
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any

import msgspec

from enginecore.errors import EngineCoreError
from enginecore.frontend.nesting import MAX_NESTING, check_nesting
from enginecore.server.app import ROUTES, App
from enginecore.server.errors import ApiError
from enginecore.server.inprocess import Reply, post

#: A line longer than this is not read into memory.
MAX_LINE_BYTES = 64 * 2**20
MAX_CUSTOM_ID = 512

_PATHS = frozenset(path for method, path, _ in ROUTES if method == "POST" and "{" not in path)


class LineError(Exception):
    """A line that is no request."""

    def __init__(self, code: str, message: str, *, param: str | None = None, custom_id: str | None = None) -> None:
        super().__init__(message)
        self.code, self.message, self.param, self.custom_id = code, message, param, custom_id


@dataclass(frozen=True, slots=True)
class BatchLine:
    """A request as it stands in a file. `body` is JSON that its route checks."""

    custom_id: str
    url: str
    body: bytes


@dataclass
class BatchCounts:
    """What has become of the lines so far. `failures` counts by status or by the code of a line's error."""

    succeeded: int = 0
    failed: int = 0
    invalid: int = 0
    skipped: int = 0
    prompt_tokens: int = 0
    generated_tokens: int = 0
    failures: Counter[str] = field(default_factory=Counter)

    @property
    def lines(self) -> int:
        return self.succeeded + self.failed + self.invalid + self.skipped


def read_line(text: bytes, app_paths: frozenset[str] = _PATHS) -> BatchLine:
    """The request on a line; LineError says what is wrong with it."""
    if len(text) >= MAX_LINE_BYTES:
        raise LineError("line_too_long", f"the line has more than {MAX_LINE_BYTES} bytes")
    try:
        check_nesting(text, limit=MAX_NESTING + 1)
        found = msgspec.json.decode(text, type=dict[str, msgspec.Raw])
    except (ApiError, EngineCoreError, msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise LineError("invalid_json", f"the line is not a JSON object: {error}") from error
    custom_id = _text(found, "custom_id")
    if not custom_id or len(custom_id) > MAX_CUSTOM_ID:
        told = f"custom_id must be a text of 1 to {MAX_CUSTOM_ID} characters"
        raise LineError("invalid_custom_id", told, param="custom_id")
    method, url = _text(found, "method"), _text(found, "url")
    if method != "POST":
        raise LineError("invalid_method", "method must be POST", param="method", custom_id=custom_id)
    if url not in app_paths:
        told = f"url must be a route that takes POST, such as /v1/chat/completions, got {str(url)[:128]!r}"
        raise LineError("invalid_url", told, param="url", custom_id=custom_id)
    body = bytes(found.get("body", b""))
    if not body.lstrip().startswith(b"{"):
        raise LineError("invalid_body", "body must be a JSON object", param="body", custom_id=custom_id)
    for name in ("stream", "background"):
        if _asks_for(body, name):
            told = f"{name} has no place in a batch; leave it out"
            raise LineError("unsupported_parameter", told, param=f"body.{name}", custom_id=custom_id)
    return BatchLine(custom_id, url, body)


def _text(found: dict[str, msgspec.Raw], name: str) -> str | None:
    try:
        return msgspec.json.decode(found[name], type=str) if name in found else None
    except msgspec.DecodeError:
        return None


def _asks_for(body: bytes, name: str) -> bool:
    if f'"{name}"'.encode() not in body:
        return False
    try:
        members = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return False  # its route says what is wrong
    return bytes(members.get(name, b"")).strip() == b"true"


class BatchRun:
    """Runs lines over an application.

    `lines` yields (number from 1, text) of lines that are not empty; `write` gets each line of output, complete with
    its line break; `done` are custom_ids that need not be run again; `progress` is called after every line.
    """

    def __init__(
        self, app: App, lines: AsyncIterator[tuple[int, bytes]], write: Callable[[bytes], None], *,
        done: frozenset[str] = frozenset(), in_flight: int, progress: Callable[[BatchCounts], None],
    ) -> None:  # fmt: skip
        self.counts = BatchCounts()
        self._app, self._lines, self._write = app, lines, write
        self._done, self._in_flight, self._progress = done, in_flight, progress
        self._seen: set[str] = set()
        self._taking = asyncio.Lock()

    async def run(self) -> BatchCounts:
        """Until every line has its answer. Raises what the engine died of: what it left unanswered is not written."""
        workers = [asyncio.create_task(self._work()) for _ in range(self._in_flight)]
        try:
            await asyncio.gather(*workers)
        finally:
            for worker in workers:
                worker.cancel()
            await asyncio.gather(*workers, return_exceptions=True)
        return self.counts

    async def _work(self) -> None:
        while True:
            async with self._taking:
                taken = await anext(self._lines, None)
            if taken is None:
                return
            number, text = taken
            try:
                line = self._new(text)
            except LineError as error:
                self._refuse(number, error)
            else:
                if line is None:
                    self.counts.skipped += 1
                else:
                    self._answer(line.custom_id, await post(self._app, line.url, line.body))
            self._progress(self.counts)

    def _new(self, text: bytes) -> BatchLine | None:
        """The request of a line, None for one that was answered by an earlier run."""
        line = read_line(text)
        if line.custom_id in self._seen:
            told = f"custom_id {line.custom_id[:128]!r} is that of an earlier line"
            raise LineError("duplicate_custom_id", told, param="custom_id", custom_id=line.custom_id)
        self._seen.add(line.custom_id)
        return None if line.custom_id in self._done else line

    def _answer(self, custom_id: str, reply: Reply) -> None:
        self._app.state.llm.check_alive()
        counts = self.counts
        counts.prompt_tokens += reply.prompt_tokens
        counts.generated_tokens += reply.generated_tokens
        if reply.status < 300:
            counts.succeeded += 1
        else:
            counts.failed += 1
            counts.failures[str(reply.status)] += 1
        body = msgspec.Raw(reply.body)
        response = {"status_code": reply.status, "request_id": reply.request_id, "body": body}
        self._put(custom_id, response, None)

    def _refuse(self, number: int, error: LineError) -> None:
        self.counts.invalid += 1
        self.counts.failures[error.code] += 1
        told = {"code": error.code, "message": error.message, "param": error.param, "line": number}
        self._put(error.custom_id, None, told)

    def _put(self, custom_id: str | None, response: dict[str, Any] | None, error: dict[str, Any] | None) -> None:
        record = {"id": f"batch_req_{uuid.uuid4().hex}", "custom_id": custom_id, "response": response, "error": error}
        self._write(msgspec.json.encode(record) + b"\n")


def is_answer(line: bytes) -> str | None:
    """The custom_id of a line of output that need not be run again: one with an answer that another try would not
    change. None for one that tells of a bad line, or of a server that was busy or broken. ValueError for a line that
    is none of ours."""
    record = msgspec.json.decode(line, type=_Written)
    if record.custom_id is None or record.response is None:
        return None
    status = record.response.status_code
    return record.custom_id if status < 500 and status != 429 else None


class _Status(msgspec.Struct):
    status_code: int


class _Written(msgspec.Struct):
    id: str
    custom_id: str | None
    response: _Status | None
    error: Any
