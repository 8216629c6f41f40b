"""The parent's side of the processes that cases run in: start them, hear them, end them in time."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections import deque
from dataclasses import dataclass, field
from selectors import EVENT_READ, DefaultSelector
from typing import Any

#: Limits on what is not a case: importing torch, making a backend (which may compile), and ending.
SERVER_SECONDS = 120.0
CREATE_SECONDS = 300.0
LEAVE_SECONDS = 30.0


@dataclass
class Ending:
    """How the process of a job ended. `case_id` was running, or had run last; None: the backend was being made."""

    kind: str
    case_id: str | None
    message: str


@dataclass
class JobResult:
    """`ended` maps a case to its "end" event. `setup_error` says why no case ran; `death` how the process died."""

    ended: dict[str, dict[str, Any]] = field(default_factory=dict)
    about: dict[str, Any] | None = None
    setup_error: str | None = None
    death: Ending | None = None


class Silence(Exception):
    """No event came in time."""


class WorkerGone(Exception):
    """The process behind the channel has ended."""


class Worker:
    """One fork server, or (`fork=False`) one fresh process for each job. Use as a context manager."""

    def __init__(self, *, fork: bool = hasattr(os, "fork")) -> None:
        self._fork = fork
        self._process: subprocess.Popen[bytes] | None = None
        self._lines: deque[bytes] = deque()
        self._partial = b""

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the server; a job that still runs is killed with it."""
        process, self._process = self._process, None
        if process is None:
            return
        assert process.stdin and process.stdout
        with contextlib.suppress(BrokenPipeError):
            process.stdin.close()
        try:
            process.wait(5 if self._fork else 0.1)
        except subprocess.TimeoutExpired:
            self._kill(process.pid)
            process.wait()
        process.stdout.close()

    def run(self, job: dict[str, Any]) -> JobResult:
        """Run one job to its end; whatever happens inside, a result comes back."""
        try:
            self._ready()
            self._send(job)
            return self._listen(job)
        except (WorkerGone, Silence, BrokenPipeError) as error:
            self.close()
            told = f"{type(error).__name__} {error}".rstrip()
            return JobResult(setup_error=f"the worker process could not be used: {told}")

    def _ready(self) -> None:
        if self._process is not None and (not self._fork or self._process.poll() is not None):
            self.close()
        if self._process is not None:
            return
        command = [sys.executable, "-m", "enginecore.testing.worker"] + ([] if self._fork else ["--once"])
        paths = os.pathsep.join(path or os.getcwd() for path in sys.path)
        # Idle threads of OpenMP must not spin: the machine may be shared, and most of a case is not the plugin's work.
        environment = {"OMP_WAIT_POLICY": "PASSIVE", **os.environ, "PYTHONPATH": paths}
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment, start_new_session=True
        )
        self._lines.clear()
        self._partial = b""
        if self._fork:
            self._event(SERVER_SECONDS)

    def _send(self, job: dict[str, Any]) -> None:
        assert self._process and self._process.stdin
        self._process.stdin.write(json.dumps(job).encode() + b"\n")
        self._process.stdin.flush()

    def _listen(self, job: dict[str, Any]) -> JobResult:
        result, current, pid, killed = JobResult(), None, 0, False
        limit = SERVER_SECONDS
        while True:
            try:
                event = self._event(limit)
            except Silence:
                if not pid or killed:  # the server itself is stuck: nothing of it can be used any more
                    raise
                self._kill(pid)
                last = current or next(reversed(result.ended), None)
                result.death = Ending("hang", last, f"no answer for {limit:.0f} s; the process was killed")
                limit, killed = LEAVE_SECONDS, True
                continue
            kind = event["event"]
            if kind == "started":
                pid, limit = event["pid"], max(30.0, job["timeout"]) if job["timeout"] else CREATE_SECONDS
            elif kind == "ready":
                result.about = event["about"]
            elif kind == "setup_failed":
                result.setup_error = event["message"]
            elif kind == "begin":
                current, limit = event["case"], job["timeout"] or event["seconds"]
            elif kind == "end":
                result.ended[event["case"]] = event
                current, limit = None, LEAVE_SECONDS
            elif kind == "leaving":
                limit = job["timeout"] or LEAVE_SECONDS
            elif kind == "exit":
                if not killed and (event["code"] != 0 or current is not None):
                    last = current or next(reversed(result.ended), None)
                    result.death = Ending("crash", last, self._obituary(event["code"], event["output"]))
                return result

    @staticmethod
    def _obituary(code: int, output: str) -> str:
        name = signal.Signals(-code).name if -code in set(signal.Signals) else f"exit code {code}"
        return f"the process died with {name}" + (f"\n{output}" if output else "")

    def _kill(self, pid: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL) if hasattr(os, "killpg") else os.kill(pid, signal.SIGTERM)

    def _event(self, limit: float) -> dict[str, Any]:
        """The next event. Silence after `limit` seconds; a process of its own reports its exit here."""
        deadline = time.monotonic() + limit
        while True:
            while self._lines:
                line = self._lines.popleft()
                if line.startswith(b"{") and line.endswith(b"}"):
                    return dict(json.loads(line))
            if not self._read(deadline):
                process = self._process
                if process is None or self._fork:
                    raise WorkerGone
                return {"event": "exit", "code": process.wait(), "output": ""}

    def _read(self, deadline: float) -> bool:
        """More bytes into `_lines`; False at the end of the stream."""
        assert self._process and self._process.stdout
        with DefaultSelector() as selector:
            selector.register(self._process.stdout, EVENT_READ)
            if not selector.select(max(0.0, deadline - time.monotonic())):
                raise Silence
        data = os.read(self._process.stdout.fileno(), 65536)
        *lines, self._partial = (self._partial + data).split(b"\n")
        self._lines.extend(lines)
        return bool(data)
