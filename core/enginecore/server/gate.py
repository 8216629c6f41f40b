"""The outermost layer: request ids, keys, limits, errors and the request log. Plain ASGI, to cost little a request."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import logging
import re
import time
import uuid
from typing import Any

from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from enginecore.server.errors import JSON, ApiError, ClientGone, as_api_error
from enginecore.server.state import ServerState

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
        self._keys = [hashlib.sha256(key.encode()).digest() for key in state.args.api_keys]
        self._log = not state.args.disable_log_requests

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await _lifespan(receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1000})
        else:
            await _Exchange(self, scope, receive, send).run()

    def check_key(self, headers: dict[bytes, bytes]) -> None:
        """Compare with every key in constant time; ApiError 401."""
        if not self._keys:
            return
        scheme, _, token = headers.get(b"authorization", b"").partition(b" ")
        given = token.strip() if scheme.lower() == b"bearer" else headers.get(b"x-api-key", b"")
        digest = hashlib.sha256(given).digest()
        matches = [hmac.compare_digest(digest, key) for key in self._keys]
        if not any(matches):
            what = "a valid API key is needed" if given else "an API key is needed: Authorization: Bearer KEY"
            raise ApiError(401, what, code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"})

    def log(self, request_id: str, scope: Scope, status: str, seconds: float) -> None:
        if self._log and (scope["path"] not in OPEN_PATHS or status[0] not in "23"):
            path = scope["path"].encode("unicode_escape").decode()[:256]
            logger.info("%s %s %s %s %.0f ms", request_id, scope["method"], path, status, seconds * 1000)


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
        scope.setdefault("state", {})
        scope["state"]["request_id"] = self._id

    async def run(self) -> None:
        start = time.monotonic()
        state = self._gate.state
        counted = self._route_path() not in OPEN_PATHS
        state.in_flight += counted
        status = ""
        try:
            await self._answer(counted)
        except ClientGone:
            status = "499 (client closed the connection)"
        finally:
            state.in_flight -= counted
            self._gate.log(self._id, self._scope, status or str(self._status), time.monotonic() - start)

    def _route_path(self) -> str:
        path: str = self._scope["path"]
        root = self._scope.get("root_path", "")
        return path[len(root) :] if root and path.startswith(root) else path

    async def _answer(self, counted: bool) -> None:
        try:
            self._check_headers()
            if counted:
                self._gate.check_key(self._headers)
                self._gate.state.check_ready()
            await self._check_length()
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
        return message

    async def _send_tagged(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._status = message["status"]
            request_id = self._id.encode()
            message["headers"] = [
                *message.get("headers", []),
                (b"x-request-id", request_id),  # OpenAI's name
                (b"request-id", request_id),  # Anthropic's
                (b"x-system-fingerprint", self._gate.state.fingerprint["id"].encode()),
            ]
        await self._send(message)

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
