"""F59: the client's X-Request-Id comes back and is in the log; one that cannot be printed is replaced."""

from __future__ import annotations

import re
import socket
from typing import Any

import pytest

from tests.field.answers import user
from tests.field.support import CHAT, COMPLETIONS, refused, wait_until
from tests.serving import ServerProcess

CASES: tuple[tuple[str, str, dict[str, Any], int], ...] = (
    ("POST", COMPLETIONS, {"prompt": "x", "max_tokens": 1}, 200),
    ("POST", CHAT, {"messages": [user("x")], "max_tokens": 1, "stream": True}, 200),
    ("POST", COMPLETIONS, {"prompt": ""}, 400),
    ("POST", CHAT, {"messages": [user("x")], "model": "other"}, 404),
    ("GET", "/nowhere", {}, 404),
)


@pytest.mark.parametrize(("method", "path", "body", "status"), CASES)
def test_echoed_or_made(sim_server: ServerProcess, method: str, path: str, body: dict[str, Any], status: int) -> None:
    name = f"f59-{method}-{status}-{len(path)}"
    answer = sim_server.http.request(method, path, json=body, headers={"X-Request-Id": name})
    assert answer.status_code == status and answer.headers.get_list("x-request-id") == [name]
    wait_until(lambda: name in sim_server.log.read_text(), "the log has the id")
    made = [sim_server.http.request(method, path, json=body).headers["x-request-id"] for _ in range(2)]
    assert made[0] != made[1] and all(re.fullmatch("[0-9a-f]{32}", each) for each in made)


def test_ids_that_are_replaced(sim_server: ServerProcess) -> None:
    for bad in ("a" * 129, "two words", "naïve", ""):
        answer = sim_server.http.get("/v1/models", headers={b"X-Request-Id": bad.encode()})
        assert answer.status_code == 200 and re.fullmatch("[0-9a-f]{32}", answer.headers["x-request-id"])
    refused(sim_server.http.get("/v1/models", headers={b"X-Request-Id": b"a\x01b"}), 400)  # no HTTP at all
    longest = "b" * 128
    assert sim_server.http.get("/v1/models", headers={"X-Request-Id": longest}).headers["x-request-id"] == longest


def test_no_line_breaks_get_through(sim_server: ServerProcess) -> None:
    with socket.create_connection(("127.0.0.1", sim_server.port), timeout=10) as raw:
        raw.sendall(
            b"GET /v1/models HTTP/1.1\r\nHost: x\r\nX-Request-Id: a\rSet-Cookie: b\r\nConnection: close\r\n\r\n"
        )
        data = b""
        while piece := raw.recv(65536):
            data += piece
    assert b"Set-Cookie" not in data
