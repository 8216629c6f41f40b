"""The server as a process, on the simulated device: start, signals, a taken port, the engine's death."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from enginecore.errors import EngineCoreError
from enginecore.server.run import bind
from enginecore_sim import EXIT_PROMPT

from tests.server.checkers import check_error, parse_events
from tests.serving import MODEL_NAME, ServerProcess

MODULES = """
import sys
import enginecore.server.run, enginecore.server.app, enginecore.frontend.async_llm
roots = {name.split(".")[0] for name in sys.modules}
print(sorted(root for root in roots if root in ("torch", "transformers") or root.startswith("enginecore_")))
"""


def test_the_api_process_imports_neither_torch_nor_a_backend() -> None:
    done = subprocess.run([sys.executable, "-c", MODULES], capture_output=True, text=True, timeout=60)
    assert done.stdout == "[]\n", done.stdout + done.stderr


def launch(tmp_path: Path, *options: str) -> ServerProcess:
    """`enginecore serve` on the simulated device."""
    sizes = ("--num-blocks", "600", "--max-model-len", "8192")
    return ServerProcess(*sizes, *options, device="sim", log=tmp_path / "server.log")


def children(server: ServerProcess) -> list[psutil.Process]:
    return list(psutil.Process(server.process.pid).children(recursive=True))


class Stream(threading.Thread):
    """A client that reads a long stream."""

    def __init__(self, server: ServerProcess, max_tokens: int, **body: Any) -> None:
        super().__init__(daemon=True)
        self._body = {"prompt": [5, 6, 7], "max_tokens": max_tokens, "stream": True, "ignore_eos": True, **body}
        self._url = server.url + "/v1/completions"
        self.started = threading.Event()
        self.text = ""
        self.hang_up = False
        self.start()

    def run(self) -> None:
        with (
            contextlib.suppress(httpx.TransportError),
            httpx.stream("POST", self._url, json=self._body, timeout=100) as response,
        ):
            for piece in response.iter_text():
                self.text += piece
                self.started.set()
                if self.hang_up:
                    return


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ServerProcess]:
    with launch(tmp_path, "--shutdown-timeout", "100") as process:
        yield process
        process.kill()


def wait_gone(processes: list[psutil.Process]) -> None:
    _, alive = psutil.wait_procs(processes, timeout=10)
    assert not alive


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_graceful_end(server: ServerProcess, number: signal.Signals) -> None:
    long, *short = [Stream(server, 8000), Stream(server, 25), Stream(server, 25)]
    assert all(stream.started.wait(60) for stream in (long, *short))
    started = children(server)
    assert started
    server.process.send_signal(number)
    while httpx.get(server.url + "/health").status_code != 503:
        time.sleep(0.01)
    refused = httpx.post(server.url + "/v1/completions", json={"prompt": "x"})
    check_error(refused.status_code, refused.content, 503)
    for stream in short:
        stream.join(100)
        assert parse_events(stream.text)[-1]["choices"][0]["finish_reason"] == "length"
    assert server.process.poll() is None
    long.hang_up = True
    assert server.process.wait(60) == 0, server.log.read_text()
    wait_gone(started)
    bind("127.0.0.1", server.port).close()


def test_in_flight_requests_get_an_error_after_the_timeout(tmp_path: Path) -> None:
    with launch(tmp_path, "--shutdown-timeout", "0") as server:
        stream = Stream(server, 8000)
        assert stream.started.wait(30)
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(60) == 0, server.log.read_text()
        stream.join(10)
        assert parse_events(stream.text)[-1]["error"]["code"] == "shutting_down"


def test_a_second_signal_ends_at_once(server: ServerProcess) -> None:
    stream = Stream(server, 8000)
    assert stream.started.wait(30)
    started = children(server)
    server.process.send_signal(signal.SIGINT)
    while "no new requests" not in server.log.read_text():
        time.sleep(0.01)
    server.process.send_signal(signal.SIGINT)
    assert server.process.wait(10) not in (0, None)
    wait_gone(started)


def test_a_signal_while_loading(tmp_path: Path) -> None:
    server = launch(tmp_path)
    try:
        time.sleep(1.5)
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(60) in (0, -signal.SIGTERM), server.log.read_text()
    finally:
        server.kill()


def test_the_port_is_taken(smollm2: str) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(EngineCoreError, match=f"127.0.0.1:{port}.*--port"):
            bind("127.0.0.1", port)
        command = [sys.executable, "-m", "enginecore", "serve", smollm2, "--device", "sim", "--port", str(port)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
        assert done.returncode != 0 and "Traceback" not in done.stderr and str(port) in done.stderr


@pytest.mark.parametrize("how", ["crash", "kill"])
def test_the_engine_dies(server: ServerProcess, how: str) -> None:
    stream = Stream(server, 8000)
    assert stream.started.wait(30)
    if how == "crash":
        with httpx.Client() as client:
            answer = client.post(server.url + "/v1/completions", json={"prompt": list(EXIT_PROMPT), "max_tokens": 5})
        check_error(answer.status_code, answer.content, 500)
    else:
        engine = next(child for child in children(server) if "enginecore.engine.process" in child.cmdline())
        os.kill(engine.pid, signal.SIGKILL)
    start = time.monotonic()
    codes = set()
    while server.process.poll() is None and time.monotonic() - start < 20:
        with contextlib.suppress(httpx.TransportError):
            codes.add(httpx.get(server.url + "/health").status_code)
            if codes == {503} and len(codes) == 1:
                refused = httpx.post(server.url + "/v1/completions", json={"prompt": "x"})
                check_error(refused.status_code, refused.content, 503)
        time.sleep(0.05)
    assert 503 in codes, server.log.read_text()
    assert server.process.wait(60) == 1, server.log.read_text()
    stream.join(10)
    assert parse_events(stream.text)[-1]["error"]["code"] == "engine_dead"


def test_headers_and_bodies_over_a_real_connection(server: ServerProcess) -> None:
    url = server.url + "/v1/completions"
    for headers in ({"x-long": "a" * 1_000_000}, {f"x-{i}": "1" for i in range(10_000)}):
        with contextlib.suppress(httpx.WriteError, httpx.ReadError, httpx.RemoteProtocolError):
            answer = httpx.get(server.url + "/health", headers=headers)
            assert answer.status_code in (400, 431)
            assert set(json.loads(answer.text)) == {"error"}
    before = psutil.Process(server.process.pid).memory_info().rss
    big = b"x" * (40 * 2**20)
    pieces = (big[i : i + 2**16] for i in range(0, len(big), 2**16))
    contents: tuple[Any, ...] = (big, pieces)
    for content in contents:
        answer = httpx.post(url, content=content, headers={"content-type": "application/json"}, timeout=60)
        check_error(answer.status_code, answer.content, 413)
    assert psutil.Process(server.process.pid).memory_info().rss - before < len(big)
    with socket.create_connection(("127.0.0.1", server.port)) as raw:
        raw.sendall(b"NONSENSE\r\n\r\n")
        assert b'"code":"invalid_http"' in raw.recv(65536)
    answer = httpx.post(url, json={"prompt": "Hello", "max_tokens": 5})
    assert answer.status_code == 200 and answer.json()["model"] == MODEL_NAME
