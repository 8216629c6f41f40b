"""A real server in a child process, for tests/e2e and tests/field."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import TracebackType
from typing import Any

import httpx

MODEL_NAME = "smollm2"

#: A small pool and the small model in float32: what the field cases assume.
SMALL = ("--dtype", "float32", "--max-model-len", "1024", "--num-blocks", "256", "--max-num-seqs", "32")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


class ServerProcess:
    """`with ServerProcess("--num-blocks", "64") as server:` serves until the block ends; output goes to `log`."""

    def __init__(
        self,
        *options: str,
        log: Path,
        model: str = "smollm2-135m",
        device: str = "cpu",
        env: dict[str, str] | None = None,
    ) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.log = log
        #: For any number of threads; connections are kept, so that a request costs the server's time and little else.
        self.http = httpx.Client(base_url=self.url, timeout=60, limits=httpx.Limits(max_connections=None))
        command = ["serve", model, "--device", device, "--host", "127.0.0.1", "--port", str(self.port)]
        command += ["--served-model-name", MODEL_NAME, *options]
        with open(log, "wb") as sink:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "enginecore.cli.main", *command],
                stdout=sink,
                stderr=subprocess.STDOUT,
                env={**os.environ, **(env or {})},
                start_new_session=True,
            )

    def wait_ready(self, timeout: float = 120) -> ServerProcess:
        deadline = time.monotonic() + timeout
        while time.monotonic() < deadline:
            if self.process.poll() is not None:
                raise RuntimeError(f"the server ended with {self.process.returncode}:\n{self.log.read_text()[-3000:]}")
            try:
                if self.http.get("/health", timeout=2).status_code == 200:
                    return self
            except httpx.TransportError:
                pass
            time.sleep(0.1)
        raise TimeoutError(f"the server is not ready after {timeout} s:\n{self.log.read_text()[-3000:]}")

    def __enter__(self) -> ServerProcess:
        try:
            return self.wait_ready()
        except BaseException:
            self.kill()
            raise

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def stop(self, timeout: float = 20) -> int:
        """SIGTERM, then the exit code; SIGKILL to the whole group after `timeout`."""
        self.http.close()
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            self.kill()
            raise

    def kill(self) -> None:
        self.http.close()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def post(self, path: str, body: dict[str, Any], **options: Any) -> httpx.Response:
        return self.http.post(path, json=body, **options)

    def complete(self, **fields: Any) -> dict[str, Any]:
        """A plain completion; greedy unless told otherwise."""
        reply = self.post("/v1/completions", {"model": MODEL_NAME, "temperature": 0, "max_tokens": 5, **fields})
        assert reply.status_code == 200, reply.text
        answer: dict[str, Any] = reply.json()
        return answer

    def metrics(self) -> dict[str, float]:
        """Samples of /metrics by name, summed over labels; histogram buckets left out."""
        from prometheus_client.parser import text_string_to_metric_families

        values: dict[str, float] = {}
        text = self.http.get("/metrics", timeout=10).text
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                if not sample.name.endswith("_bucket"):
                    values[sample.name] = values.get(sample.name, 0.0) + sample.value
        return values

    def resident_bytes(self) -> int:
        """Resident memory of the server and its children."""
        import psutil

        root = psutil.Process(self.process.pid)
        return sum(process.memory_info().rss for process in [root, *root.children(recursive=True)])
