"""Uvicorn as we run it: its HTTP/1.1 protocol with a bound on headers while they arrive, and the error envelope for
broken requests."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Generator
from typing import Any

import uvicorn
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from enginecore.server.errors import JSON, ApiError


class QuietServer(uvicorn.Server):
    """Uvicorn without its signal handling, which closes the port before requests in flight are done."""

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield


class LimitedProtocol(HttpToolsProtocol):
    """The gate checks exact limits once headers are complete; this stops a header section that never ends."""

    #: Bytes of one header section. The class made by `limited_protocol` has the server's own.
    max_header_bytes = 1 << 20

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._in_headers = True
        self._header_bytes = 0

    def data_received(self, data: bytes) -> None:
        if self._in_headers:
            self._header_bytes += len(data)
        super().data_received(data)
        if self._in_headers and self._header_bytes > self.max_header_bytes:
            message = f"the headers have more than {self.max_header_bytes} bytes"
            self._refuse(ApiError(431, message, code="headers_too_large"))

    def on_message_begin(self) -> None:
        self._in_headers = True
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        self._in_headers = False
        self._header_bytes = 0
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        super().on_message_complete()
        self._in_headers = True

    def send_400_response(self, msg: str) -> None:
        self._refuse(ApiError(400, "the request is not valid HTTP", code="invalid_http"))

    def _refuse(self, error: ApiError) -> None:
        """Answer in the envelope and close."""
        if self.transport.is_closing():
            return
        body = error.body()
        head = STATUS_LINE[error.status] + b"content-type: " + JSON.encode() + b"\r\ncontent-length: "
        self.transport.write(head + str(len(body)).encode() + b"\r\nconnection: close\r\n\r\n" + body)
        self.transport.close()


def limited_protocol(max_header_bytes: int) -> type[asyncio.Protocol]:
    """The protocol with a server's own limit. Slack for what a packet holds beyond the headers is allowed."""
    return type("Protocol", (LimitedProtocol,), {"max_header_bytes": max_header_bytes + (1 << 18)})
