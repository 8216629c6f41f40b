"""An OpenAI-compatible server as small as it gets, in a thread: scripted streams, and a record of what was asked."""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any


class StubServer:
    """`with StubServer(words=[...]) as stub:` answers every completion with those words, one a chunk.

    `status` other than 200 refuses with `message`; `cut` ends streams without [DONE]; `api_key` is demanded when set.
    `unknown` are fields that it refuses; without `usage` it counts nothing; `per_chunk` tokens are counted a word.
    """

    def __init__(
        self,
        words: list[str],
        *,
        status: int = 200,
        message: str = "no",
        cut: bool = False,
        api_key: str | None = None,
        unknown: tuple[str, ...] = (),
        usage: bool = True,
        per_chunk: int = 1,
    ) -> None:
        self.words, self.status, self.message, self.cut, self.api_key = words, status, message, cut, api_key
        self.bodies: list[dict[str, Any]] = []
        stub = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, format: str, *args: Any) -> None:
                pass

            def do_GET(self) -> None:
                self._json(200, {"data": [{"id": "stub"}]})

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                stub.bodies.append(body)
                if stub.api_key and self.headers.get("Authorization") != f"Bearer {stub.api_key}":
                    self._json(401, {"error": {"message": "bad key"}})
                elif refused := [name for name in unknown if name in body]:
                    self._json(422, {"error": {"message": f"unknown field {refused[0]}"}})
                elif stub.status != 200:
                    self._json(stub.status, {"error": {"message": stub.message}})
                else:
                    self._stream(chat="chat" in self.path)

            def _json(self, status: int, value: Any) -> None:
                data = json.dumps(value).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def _stream(self, *, chat: bool) -> None:
                self.send_response(200)
                self.send_header("Content-Type", "text/event-stream")
                self.send_header("Connection", "close")
                self.end_headers()
                for word in stub.words:
                    self._event({"choices": [{"delta": {"content": word}} if chat else {"text": word}]})
                if usage:
                    counts = {"prompt_tokens": 3, "completion_tokens": per_chunk * len(stub.words)}
                    self._event({"choices": [], "usage": counts})
                if not stub.cut:
                    self.wfile.write(b"data: [DONE]\n\n")
                self.close_connection = True

            def _event(self, value: Any) -> None:
                self.wfile.write(b"data: " + json.dumps(value).encode() + b"\n\n")

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.01})

    def __enter__(self) -> StubServer:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()
