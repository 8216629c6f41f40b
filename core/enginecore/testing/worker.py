"""The processes that cases run in: `python -m enginecore.testing.worker`.

The parent cannot fork itself: a test run may hold threads and a half-used OpenMP pool, which do not survive a fork. So
it starts this module once, which imports torch, runs nothing, and forks for every group of cases:

    parent  --job-->  fork server  --fork-->  child: makes the backend, runs the cases, ends
            <------------- events, one JSON object a line -------------

The plugin is imported in the child only. With `--once` (where fork does not exist) the process is its own child.
What a plugin prints is kept apart from the events and shown when the child dies.
"""

from __future__ import annotations

import faulthandler
import json
import os
import select
import signal
import sys
import tempfile
import time
import traceback
from typing import Any

#: Torch threads of a worker: results must not depend on it, and the machine may be shared.
THREADS = 2


class Channel:
    """Events to the parent. Each starts on a new line: a child that was killed may have left half of one."""

    def __init__(self, fd: int) -> None:
        self._fd = fd

    def send(self, event: str, **fields: Any) -> None:
        data = ("\n" + json.dumps({"event": event, **fields}) + "\n").encode()
        while data:
            data = data[os.write(self._fd, data) :]


def run_job(job: dict[str, Any], channel: Channel) -> None:
    """Make the backend, run the cases of `job` one after another, report each."""
    import torch

    from enginecore.testing.case import CaseContext
    from enginecore.testing.cases import all_cases
    from enginecore.testing.source import BackendSource

    torch.set_num_threads(THREADS)
    wanted = {case.id: case for case in all_cases()}
    channel.send("creating")
    try:
        backend, profile, about = BackendSource(**job["source"]).create()
    except BaseException as error:
        channel.send("setup_failed", message=f"the backend could not be created: {describe(error)}")
        return
    channel.send("ready", about=_about(backend, profile, about))
    for case_id in job["cases"]:
        case = wanted[case_id]
        channel.send("begin", case=case_id, seconds=case.seconds * profile.timeout_scale)
        started = time.monotonic()
        ctx = CaseContext(case, backend, profile, job["options"])
        outcome, message = judge(lambda ctx=ctx: _play(ctx))
        seconds = time.monotonic() - started
        channel.send("end", case=case_id, outcome=outcome, message=message, seconds=seconds, metrics=ctx.metrics)


def _play(ctx: Any) -> None:
    ctx.case.run(ctx)
    ctx.check_floors()


def judge(run: Any) -> tuple[str, str]:
    """Run a case and name how it ended."""
    from enginecore.errors import UnsupportedError
    from enginecore.testing.case import DeclaredUnsupported, FalseClaim, Outcome, ProcessDied, ProcessHung

    try:
        run()
    except DeclaredUnsupported as reason:
        return Outcome.DECLARED_UNSUPPORTED.value, str(reason)
    except FalseClaim as claim:
        return Outcome.FALSE_CLAIM.value, str(claim)
    except ProcessDied as death:
        return Outcome.CRASH.value, str(death)
    except ProcessHung as silence:
        return Outcome.HANG.value, str(silence)
    except (NotImplementedError, UnsupportedError) as error:
        return Outcome.FALSE_CLAIM.value, f"it was claimed, and refused when used: {describe(error)}"
    except AssertionError as error:
        return Outcome.FAIL.value, str(error) or describe(error)
    except Exception as error:
        return Outcome.FAIL.value, describe(error)
    return Outcome.PASS.value, ""


def describe(error: BaseException) -> str:
    """The error and the innermost frames outside this kit's own plumbing."""
    frames = traceback.extract_tb(error.__traceback__)[-3:]
    places = "; ".join(f"{os.path.basename(frame.filename)}:{frame.lineno} {frame.name}" for frame in frames)
    return f"{type(error).__name__}: {error} [{places}]"


def _about(backend: Any, profile: Any, about: dict[str, str]) -> dict[str, Any]:
    from enginecore.testing.support import support_of

    try:
        support = support_of(backend)
    except Exception as error:  # level 0 says what is wrong with such a backend
        support = {"runtime": False, "ops": {}, "attention": {}, "error": describe(error)}
    gaps = [{"cases": gap.cases, "reason": gap.reason, "expires": gap.expires} for gap in profile.gaps]
    floors = [vars(floor) for floor in profile.floors]
    claims = _plain(backend.capabilities)
    return {
        **about, "backend": type(backend).__qualname__, "gaps": gaps, "floors": floors, "capabilities": claims,
        "support": support, "memory": _memory(backend), "skips_expire": profile.skips_expire,
    }  # fmt: skip


def _memory(backend: Any) -> dict[str, Any]:
    """The device's memory as this process sees it; empty when the plugin cannot say (level 2 says what is wrong)."""
    try:
        return dict(vars(backend.memory.memory_info()))
    except Exception:
        return {}


def _plain(capabilities: Any) -> dict[str, Any]:
    def flat(value: Any) -> Any:
        if isinstance(value, (frozenset, set)):
            return sorted(value)
        return getattr(value, "value", value)

    return {name: flat(value) for name, value in vars(capabilities).items()}


def _child(job: dict[str, Any], channel: Channel, log: int) -> None:
    """The whole life of a child. Output of the plugin goes to `log`; a fatal signal leaves its traceback there."""
    os.dup2(log, 1)
    os.dup2(log, 2)
    faulthandler.enable(file=2, all_threads=False)
    code = 0
    try:
        run_job(job, channel)
    except BaseException:
        traceback.print_exc()
        code = 70
    sys.stdout.flush()
    sys.stderr.flush()
    channel.send("leaving")
    if job.get("clean_exit"):
        sys.exit(code)
    os._exit(code)


def _tail(log: int) -> str:
    size = os.lseek(log, 0, os.SEEK_END)
    os.lseek(log, max(0, size - 4000), os.SEEK_SET)
    return os.read(log, 4000).decode(errors="replace").strip()


def _supervise(pid: int, stdin_fd: int) -> int:
    """Wait for the child; when the parent goes away meanwhile, end the child and this process."""
    pause = 0.001
    while True:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        readable, _, _ = select.select([stdin_fd], [], [], pause)
        if readable and not os.read(stdin_fd, 1):
            os.killpg(pid, signal.SIGKILL)
            os._exit(0)
        pause = min(pause * 2, 0.05)


def serve(channel: Channel) -> None:
    """Fork once for each job on standard input, until it ends."""
    import torch  # noqa: F401  (before the fork: every child has it at once)

    import enginecore.testing.cases
    import enginecore.testing.source

    enginecore.testing.cases.all_cases()
    channel.send("serving")
    while line := _read_line(0):
        job = json.loads(line)
        with tempfile.TemporaryFile() as log:
            pid = os.fork()
            if pid == 0:
                os.setpgid(0, 0)
                os.close(0)
                _child(job, channel, log.fileno())
            channel.send("started", pid=pid)
            code = _supervise(pid, 0)
            channel.send("exit", code=code, output=_tail(log.fileno()))


def _read_line(fd: int) -> bytes:
    """A line without buffering beyond it, so that `_supervise` sees the end of input."""
    line = b""
    while not line.endswith(b"\n"):
        piece = os.read(fd, 1)
        if not piece:
            return b""
        line += piece
    return line


def main() -> None:
    channel = Channel(os.dup(1))  # not inheritable: what a plugin starts cannot hold it open
    os.dup2(2, 1)
    if "--once" not in sys.argv:
        serve(channel)
        return
    job = json.loads(_read_line(0))
    with tempfile.TemporaryFile() as log:
        channel.send("started", pid=os.getpid())
        _child(job, channel, log.fileno())


if __name__ == "__main__":
    main()
