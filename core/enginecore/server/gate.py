"""The outermost layer: request ids, keys, limits, errors and the request log. Plain ASGI, to cost little a request."""

from __future__ import annotations

import asyncio
import logging
import re
import time
import uuid
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from enginecore.frontend.tenancy import current_tenant
from enginecore.server.audit import MAX_BODY_BYTES, AuditLog
from enginecore.server.errors import JSON, ApiError, ClientGone, as_api_error
from enginecore.server.keys import Client, Tally
from enginecore.server.state import ServerState
from enginecore.server.tracing import make_tracer, traced

logger = logging.getLogger("enginecore.server")

#: Routes that need no API key and that shutting down does not wait for.
OPEN_PATHS = frozenset({"/health", "/ping", "/version", "/metrics"})

_REQUEST_ID = re.compile(rb"[\x21-\x7e]{1,128}")
#: How much of a body that is too large is read and thrown away, so that the client gets to read the answer.
_DRAIN_FACTOR, _DRAIN_SECONDS = 16, 20.0


class _BodyTooLarge(Exception):
    pass


class Gate:
    """Wraps the router."""

    def __init__(self, app: ASGIApp, state: ServerState) -> None:
        self._app = app
        self.state = state
        args = state.args
        self._log = not args.disable_log_requests
        self.audit = AuditLog(args.audit_log, with_bodies=args.audit_bodies) if args.audit_log is not None else None
        self.tracer = make_tracer(args.otlp_traces_endpoint, state.model_name)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await _lifespan(receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1000})
        else:
            await _Exchange(self, scope, receive, send).run()

    def log(self, record: dict[str, Any], body: bytes) -> None:
        """A line for the operator and one for the audit."""
        status, path = str(record["status"]), record["path"]
        if path not in OPEN_PATHS or status[0] not in "23":
            if self._log:
                logger.info(
                    "%s %s %s %s %.0f ms, client %s, tokens %d in, %d out", record["request_id"], record["method"],
                    path, status, record["ms"], record["client"] or "-", record["prompt_tokens"],
                    record["generated_tokens"],
                )  # fmt: skip
            if self.audit is not None:
                self.audit.write(record, body)


class _Exchange:
    """One request and its answer."""

    def __init__(self, gate: Gate, scope: Scope, receive: Receive, send: Send) -> None:
        self._gate, self._scope, self._receive, self._send = gate, scope, receive, send
        self._headers: dict[bytes, bytes] = dict(scope["headers"])
        self._status = 0
        self._body_read = 0
        self._body_ended = False
        given = self._headers.get(b"x-request-id", b"")
        self._id = given.decode() if _REQUEST_ID.fullmatch(given) else uuid.uuid4().hex
        self._client: Client | None = None
        self._tally: Tally | None = None
        self._body = b""
        scope.setdefault("state", {})
        scope["state"]["request_id"] = self._id

    async def run(self) -> None:
        start = time.monotonic()
        state = self._gate.state
        counted = self._route_path() not in OPEN_PATHS
        state.in_flight += counted
        gone = False
        try:
            await self._answer(counted)
        except ClientGone:
            gone = True
        finally:
            state.in_flight -= counted
            self._gate.log(self._record(time.monotonic() - start, gone=gone), self._body)

    def _record(self, seconds: float, *, gone: bool) -> dict[str, Any]:
        """What happened, without what was said."""
        tally, address = self._tally, self._scope.get("client")
        return {
            "request_id": self._id,
            "client": self._client.name if self._client is not None else None,
            "address": address[0] if address else None,
            "method": self._scope["method"],
            "path": self._scope["path"].encode("unicode_escape").decode()[:256],
            "status": "499 (client closed the connection)" if gone else self._status,
            "ms": round(seconds * 1000, 1),
            "prompt_tokens": tally.prompt if tally is not None else 0,
            "generated_tokens": tally.generated if tally is not None else 0,
        }

    def _route_path(self) -> str:
        path: str = self._scope["path"]
        root = self._scope.get("root_path", "")
        return path[len(root) :] if root and path.startswith(root) else path

    async def _answer(self, counted: bool) -> None:
        try:
            self._check_headers()
            if counted:
                self._identify()
                self._gate.state.check_ready()
            await self._check_length()
            with self._traced(), self._admit():
                await self._gate._app(self._scope, self._receive_counted, self._send_tagged)
        except _BodyTooLarge:
            await self._refuse_body()
        except ClientGone:
            raise
        except ClientDisconnect as error:  # in the middle of the body
            raise ClientGone from error
        except Exception as error:
            answer = as_api_error(error)
            if answer is None:
                logger.exception("%s failed", self._id)
                answer = ApiError(500, "internal error")
            if self._status:
                raise ClientGone from error  # half an answer is out; nothing sensible can follow
            body = answer.body_for(self._route_path(), self._id)
            response = Response(body, answer.status, answer.headers, media_type=JSON)
            await response(self._scope, self._receive, self._send_tagged)

    def _identify(self) -> None:
        """Who is calling? 401 for nobody known."""
        self._client = self._gate.state.keys.find(self._headers)
        self._tally = Tally(self._client)
        self._scope["state"] |= {"client": self._client, "tally": self._tally}
        current_tenant.set(self._client.name if len(self._gate.state.keys.names()) > 1 else None)

    def _admit(self) -> AbstractContextManager[None]:
        """A client's limits are for what it asks to be done; looking is free."""
        if self._client is None or self._scope["method"] != "POST":
            return nullcontext()
        return self._client.admit()

    def _traced(self) -> AbstractContextManager[None]:
        """A span for what is asked to be done."""
        tracer = self._gate.tracer
        if tracer is None or self._tally is None or self._scope["method"] != "POST":
            return nullcontext()
        return traced(tracer, self._route_path(), self._headers, self._id, self._tally, self._scope["state"])

    def _check_headers(self) -> None:
        args = self._gate.state.args
        headers = self._scope["headers"]
        if len(headers) > args.max_headers:
            raise ApiError(431, f"there are more than {args.max_headers} headers", code="headers_too_large")
        size = sum(len(name) + len(value) + 4 for name, value in headers) + len(self._scope.get("raw_path", b""))
        if size > args.max_header_bytes:
            raise ApiError(431, f"the headers have more than {args.max_header_bytes} bytes", code="headers_too_large")

    async def _check_length(self) -> None:
        length = self._headers.get(b"content-length", b"0")
        if length.isdigit() and int(length) > self._gate.state.args.max_body_bytes:
            raise _BodyTooLarge

    async def _receive_counted(self) -> Message:
        message = await self._receive()
        if message["type"] == "http.request":
            self._body_read += len(message.get("body", b""))
            self._body_ended = not message.get("more_body", False)
            if self._body_read > self._gate.state.args.max_body_bytes:
                raise _BodyTooLarge
            audit = self._gate.audit
            if audit is not None and audit.with_bodies and len(self._body) < MAX_BODY_BYTES:
                self._body += message.get("body", b"")
        return message

    async def _send_tagged(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._status = self._scope["state"]["status"] = message["status"]
            request_id = self._id.encode()
            message["headers"] = [
                *message.get("headers", []),
                (b"x-request-id", request_id),  # OpenAI's name
                (b"request-id", request_id),  # Anthropic's
                (b"x-system-fingerprint", self._fingerprint().encode()),
            ]
        await self._send(message)

    def _fingerprint(self) -> str:
        """Of the answer: the server's, unless a route has chosen an adapter."""
        chosen = self._scope["state"].get("fingerprint")
        return chosen if chosen is not None else self._gate.state.fingerprint_id()

    async def _refuse_body(self) -> None:
        """413. The answer goes out first; then the rest of the body is read, in bounds, so that the client sees it."""
        limit = self._gate.state.args.max_body_bytes
        error = ApiError(413, f"the body has more than {limit} bytes", code="body_too_large")
        body = error.body_for(self._route_path(), self._id)
        headers: list[Any] = [(b"content-type", JSON.encode()), (b"content-length", str(len(body)).encode())]
        headers.append((b"connection", b"close"))
        await self._send_tagged({"type": "http.response.start", "status": 413, "headers": headers})
        await self._send({"type": "http.response.body", "body": body, "more_body": True})
        if self._headers.get(b"expect", b"").lower() != b"100-continue":
            try:
                await asyncio.wait_for(self._drain(_DRAIN_FACTOR * limit), _DRAIN_SECONDS)
            except asyncio.TimeoutError:
                logger.warning("%s the rest of a body that is too large did not arrive in time", self._id)
        await self._send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _drain(self, limit: int) -> None:
        dropped = 0
        while not self._body_ended and dropped < limit:
            message = await self._receive()
            if message["type"] != "http.request":
                return
            dropped += len(message.get("body", b""))
            self._body_ended = not message.get("more_body", False)


async def _lifespan(receive: Receive, send: Send) -> None:
    while True:
        kind = (await receive())["type"]
        await send({"type": f"{kind}.complete"})
        if kind == "lifespan.shutdown":
            return
