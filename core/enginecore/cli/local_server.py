"""A server of our own for as long as a command needs one: `chat` and `bench serve` talk to it as to any other.

Run as a module it is that server: `enginecore serve` that also ends when its standard input does, so that it never
outlives the command that started it, however that ended.
"""

from __future__ import annotations

import http.client
import os
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TextIO

from enginecore.cli.common import engine_argv, tell_loading
from enginecore.config import EngineArgs
from enginecore.errors import EngineCoreError

HOST = "127.0.0.1"
POLL_S = 0.02
STOP_TIMEOUT_S = 10.0


class LocalServerError(EngineCoreError):
    """The server ended before it was ready; exits with the code that the server ended with."""


@dataclass(frozen=True)
class LocalServer:
    """A running server. `startup_s` is the time from launch to its first healthy answer."""

    url: str
    api_key: str
    startup_s: float


@contextmanager
def local_server(engine: EngineArgs) -> Iterator[LocalServer]:
    """Start `enginecore serve` with these settings on a free port, wait until it is healthy, and stop it afterwards.

    Raises LocalServerError with the server's own words when it does not come up.
    """
    tell_loading(engine)
    port, api_key = _free_port(), secrets.token_urlsafe(24)
    command = [sys.executable, "-m", "enginecore.cli.local_server", "--host", HOST, "--port", str(port)]
    command += engine_argv(engine)
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as log:
        begun = time.monotonic()
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=log,
            env={**os.environ, "ENGINECORE_API_KEY": api_key},
            start_new_session=True,  # Ctrl-C in the terminal is for the command, not for its server
        )
        try:
            url = f"http://{HOST}:{port}"
            while not _healthy(port):
                if process.poll() is not None:
                    raise _failure(process.returncode, log)
                time.sleep(POLL_S)
            yield LocalServer(url, api_key, time.monotonic() - begun)
        finally:
            _stop(process)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        port: int = probe.getsockname()[1]
        return port


def _healthy(port: int) -> bool:
    """Asked by simple means: a client library would take processor time from the server that is starting."""
    connection = http.client.HTTPConnection(HOST, port, timeout=2)
    try:
        connection.request("GET", "/health")
        return connection.getresponse().status == 200
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


def _failure(code: int, log: TextIO) -> LocalServerError:
    log.seek(0)
    lines = [line.rstrip("\n") for line in log]
    said = [line for line in lines if line.startswith("error: ")]
    fixes = [line.removeprefix("fix: ") for line in lines if line.startswith("fix: ")]
    last = said[-1].removeprefix("error: ") if said else f"the server ended with code {code}: {' '.join(lines[-3:])}"
    error = LocalServerError(last, fix=fixes[-1] if fixes else None)
    error.exit_code = code if code > 0 else 1
    return error


def _stop(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    assert process.stdin is not None
    process.stdin.close()
    try:
        process.wait(STOP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _end_with_stdin() -> None:
    while os.read(0, 4096):
        pass
    os.kill(os.getpid(), signal.SIGTERM)


def _main() -> int:
    from enginecore.cli.main import main

    threading.Thread(target=_end_with_stdin, daemon=True).start()
    return main(["serve", *sys.argv[1:]])


if __name__ == "__main__":
    sys.exit(_main())
