"""F16: headers, bodies and request ids beyond their limits are refused cheaply."""

from __future__ import annotations

import contextlib
import json
import socket
from collections.abc import Iterator

import httpx
import pytest

from tests.field.support import COMPLETIONS, unharmed, wait_until
from tests.server.checkers import check_error
from tests.serving import ServerProcess

MIB = 2**20
#: The server's default limit on bodies.
LIMIT = 16 * MIB
BIG = 100 * MIB


def _exchange(server: ServerProcess, pieces: Iterator[bytes]) -> tuple[int, bytes, bytes]:
    """Send raw bytes as far as the server takes them; (status, headers, body) of what it answers."""
    with socket.create_connection(("127.0.0.1", server.port), timeout=60) as connection:
        with contextlib.suppress(ConnectionError):
            for piece in pieces:
                connection.sendall(piece)
        received = b""
        with contextlib.suppress(ConnectionError):
            while chunk := connection.recv(65536):
                received += chunk
                head, _, body = received.partition(b"\r\n\r\n")
                if b"content-length" in head.lower():
                    length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
                    if len(body) >= length:
                        break
    head, _, body = received.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 "), received[:200]
    return int(head.split()[1]), head, body


def _headers(*extra: bytes) -> Iterator[bytes]:
    yield b"POST /v1/completions HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\n"
    yield from extra


def test_one_header_of_a_megabyte(sim_server: ServerProcess) -> None:
    with unharmed(sim_server):
        pieces = _headers(b"x-long: " + b"a" * MIB, b"\r\ncontent-length: 2\r\n\r\n{}")
        status, _, body = _exchange(sim_server, pieces)
        check_error(status, body, 431)


def test_ten_thousand_headers(sim_server: ServerProcess) -> None:
    with unharmed(sim_server):
        lines = b"".join(b"x-%d: 1\r\n" % index for index in range(10_000))
        status, _, body = _exchange(sim_server, _headers(lines, b"content-length: 2\r\n\r\n{}"))
        check_error(status, body, 431)


def test_headers_that_never_end(sim_server: ServerProcess) -> None:
    with unharmed(sim_server):
        status, _, body = _exchange(sim_server, _headers(*(b"x-%d: aaaaaaaa\r\n" % index for index in range(10**5))))
        check_error(status, body, 431)


@pytest.mark.parametrize("chunked", [False, True], ids=["with its length", "chunked"])
def test_a_body_of_100_megabytes(sim_server: ServerProcess, chunked: bool) -> None:
    """413, and memory grows by a few limits at most, not by the body."""
    before = sim_server.resident_bytes()
    piece = b"x" * MIB

    def pieces() -> Iterator[bytes]:
        if chunked:
            yield from _headers(b"transfer-encoding: chunked\r\n\r\n")
            for _ in range(BIG // MIB):
                yield b"%x\r\n" % MIB + piece + b"\r\n"
            yield b"0\r\n\r\n"
        else:
            yield from _headers(b"content-length: %d\r\n\r\n" % BIG)
            for _ in range(BIG // MIB):
                yield piece

    with unharmed(sim_server):
        status, _, body = _exchange(sim_server, pieces())
        assert check_error(status, body, 413)["code"] == "body_too_large"
    assert sim_server.resident_bytes() - before < 4 * LIMIT


def test_a_body_just_below_the_limit_is_read(sim_server: ServerProcess) -> None:
    body = json.dumps({"prompt": "a", "max_tokens": 1, "user": "x" * (LIMIT - 200)}).encode()
    with unharmed(sim_server):
        answer = sim_server.http.post(COMPLETIONS, content=body, headers={"content-type": "application/json"})
        assert answer.status_code == 200, answer.text


@pytest.mark.parametrize("length", [b"content-length: 100000\r\n\r\n", b"transfer-encoding: chunked\r\n\r\n10\r\n"])
def test_hanging_up_in_the_middle_of_a_body_is_no_failure(sim_server: ServerProcess, length: bytes) -> None:
    """Nobody is there to answer, and the log has a line, not a traceback."""
    before = sim_server.log.stat().st_size
    with unharmed(sim_server):
        with socket.create_connection(("127.0.0.1", sim_server.port), timeout=60) as connection:
            connection.sendall(b"".join(_headers(length, b'{"prompt"')))
        wait_until(lambda: b"POST /v1/completions 499" in sim_server.log.read_bytes()[before:], "the request is logged")
    assert b"Traceback" not in sim_server.log.read_bytes()[before:]


@pytest.mark.parametrize(
    "given",
    [b"a" * 129, b"a" * 300, b"a b", b"tab\there", b"\xc3\xa9", b"caf\xe9", b"", b"x" * 60_000],
    ids=["129", "300", "blank", "tab", "utf-8", "latin-1", "empty", "60000"],
)
def test_request_ids_that_are_not_taken(sim_server: ServerProcess, given: bytes) -> None:
    """Replaced by one of our own, in the header and in the answer."""
    body = b'{"prompt": "a", "max_tokens": 1}'
    lines = b"x-request-id: " + given + b"\r\ncontent-length: %d\r\n\r\n" % len(body) + body
    status, head, answer = _exchange(sim_server, _headers(lines))
    assert status == 200
    (shown,) = [line[14:] for line in head.split(b"\r\n") if line.lower().startswith(b"x-request-id: ")]
    assert shown != given and len(shown) == 32 and json.loads(answer)["id"] == "cmpl-" + shown.decode()


def test_a_request_id_of_a_megabyte_or_with_line_breaks(sim_server: ServerProcess) -> None:
    with unharmed(sim_server):
        lines = b"x-request-id: " + b"a" * MIB + b"\r\ncontent-length: 2\r\n\r\n{}"
        status, head, body = _exchange(sim_server, _headers(lines))
        check_error(status, body, 431)
        assert b"aaaa" not in head
        for injected in (b"a\r\nset-cookie: x=1", b"a\nset-cookie: x=1", b"a\r set-cookie: x=1", b"a\x00b", b"a\x7f"):
            content = b'{"prompt": "a", "max_tokens": 1}'
            lines = b"x-request-id: " + injected + b"\r\ncontent-length: %d\r\n\r\n" % len(content) + content
            status, head, body = _exchange(sim_server, _headers(lines))
            assert status in (200, 400)
            assert b"set-cookie" not in head.lower() and b"\x00" not in head


def test_the_longest_request_id_is_echoed(sim_server: ServerProcess) -> None:
    given = "a" * 128
    answer = httpx.get(f"{sim_server.url}/v1/models", headers={"x-request-id": given})
    assert answer.headers["x-request-id"] == given
