"""Run a module of this package in a process of its own, which a plugin or a driver under it may end as it likes."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from typing import IO, Any

_STDERR_LINES, _STDERR_BYTES = 40, 16384


@dataclass(frozen=True, kw_only=True)
class Ended:
    """How a child ended: what it wrote to stdout, how the end reads in a sentence, and the last lines of its stderr."""

    out: bytes
    reason: str
    trace: str


def run_child(module: str, task: dict[str, Any], timeout_s: float) -> Ended:
    """`python -m MODULE` with `task` as JSON on stdin, killed with all that it started after `timeout_s`."""
    # The child finds modules where this process does; a session of its own lets us end its children with it.
    paths = os.pathsep.join(path or os.getcwd() for path in sys.path)
    environment = dict(os.environ, PYTHONPATH=paths, PYTHONSAFEPATH="1")
    # A file for stderr, not a pipe: a grandchild that keeps it open then delays nothing, and much output costs nothing.
    with tempfile.TemporaryFile() as errors:
        child = subprocess.Popen(
            [sys.executable, "-m", module],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            env=environment,
            start_new_session=True,
        )
        try:
            out, _ = child.communicate(json.dumps(task).encode(), timeout=timeout_s)
        except subprocess.TimeoutExpired as expired:
            _end(child)
            reason = f"did not end within {timeout_s:g} s"
            return Ended(out=expired.output or b"", reason=reason, trace=_tail(errors))
        finally:
            _end(child)
        return Ended(out=out, reason=_how_it_ended(child.returncode), trace=_tail(errors))


def _end(child: subprocess.Popen[bytes]) -> None:
    """Kill what is left of the child's session."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(child.pid, signal.SIGKILL)
    child.kill()
    child.wait()


def _how_it_ended(code: int) -> str:
    if code >= 0:
        return f"ended its process with exit code {code} and no answer"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    return f"was killed by {name}"


def _tail(errors: IO[bytes]) -> str:
    errors.seek(max(0, errors.seek(0, os.SEEK_END) - _STDERR_BYTES))
    return "\n".join(errors.read().decode(errors="replace").strip().splitlines()[-_STDERR_LINES:])
