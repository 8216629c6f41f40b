"""The child process of a probe: `python -m enginecore.device.probe_main` with the task as JSON on stdin.

The answer is one line of JSON on what was stdout when the process began. File descriptor 1 then points to stderr, so
that a plugin, or a C library under it, may print what it likes. Whatever kills this process is told by `probe.py`.
"""

from __future__ import annotations

import faulthandler
import json
import os
import sys
import traceback
from dataclasses import asdict
from enum import Enum
from typing import Any

from enginecore.device.discovery import InstalledPlugin
from enginecore.device.loading import load_hooks
from enginecore.device.manifest import (
    DoctorContext,
    DoctorFinding,
    Manifest,
    ProbeCause,
    ProbeContext,
    ProbeResult,
    ProbeStatus,
)
from enginecore.device.torch_build import torch_build, torch_gate, torch_problem
from enginecore.errors import WrongTorchBuildError


def main() -> None:
    answer_fd = os.dup(1)
    os.dup2(2, 1)
    task = json.load(sys.stdin)
    faulthandler.enable()
    # Shows where a hanging plugin hangs: the traceback is in stderr by the time the parent gives up.
    faulthandler.dump_traceback_later(task["timeout_s"] * 0.9, exit=False)
    try:
        answer = _TASKS[task["hook"]](task)
    except BaseException as error:
        if isinstance(error, SystemExit):
            reason = f"called sys.exit({error.code!r})"
        else:
            reason = f"raised {type(error).__name__}: {error}"
        trace = "".join(traceback.format_exception(type(error), error, error.__traceback__))
        answer = {"raised": reason, "traceback": trace}
    os.write(answer_fd, json.dumps(answer, default=_plain).encode() + b"\n")
    os.close(answer_fd)
    sys.stdout.flush()
    sys.stderr.flush()
    # A driver library that crashes or waits while it is unloaded must not spoil an answer that is already given.
    os._exit(0)


def _plain(value: object) -> object:
    return value.value if isinstance(value, Enum) else repr(value)


def _plugin(task: dict[str, Any]) -> InstalledPlugin:
    return InstalledPlugin(**task["plugin"])


def _probe(task: dict[str, Any]) -> dict[str, Any]:
    """Run the probe; torch of the wrong build is refused before it is imported, whatever the plugin checks."""
    hooks, build = load_hooks(_plugin(task)), torch_build()
    problem = torch_problem(Manifest(**task["manifest"]), build)
    refused = False

    def refuse_wrong_torch() -> None:
        nonlocal refused
        if problem is not None:
            refused = True
            raise WrongTorchBuildError(problem.reason, fix=problem.fix)

    try:
        with torch_gate(refuse_wrong_torch):
            result = hooks.enginecore_probe(ctx=ProbeContext(device=task["device"], torch_build=build))
    except Exception:
        if not refused or problem is None:
            raise
        return {"probe": asdict(problem)}
    wrong = _invalid_result(result)
    if wrong:
        return {"raised": wrong, "traceback": ""}
    if problem is not None and (refused or result.status is ProbeStatus.AVAILABLE):
        result = problem
    return {"probe": asdict(result)}


def _invalid_result(result: object) -> str | None:
    if not isinstance(result, ProbeResult):
        return f"returned {type(result).__name__}, not enginecore.device.ProbeResult"
    if not isinstance(result.status, ProbeStatus) or not isinstance(result.cause, ProbeCause):
        return f"returned a status or cause that is not of the contract: {result!r}"
    if not isinstance(result.reason, str) or not isinstance(result.fix, str) or not isinstance(result.details, dict):
        return f"returned fields of the wrong type: {result!r}"
    if not result.reason:
        return "returned a result without a reason"
    return None


def _doctor(task: dict[str, Any]) -> dict[str, Any]:
    ctx = DoctorContext(device=task["device"], torch_build=torch_build())
    findings = load_hooks(_plugin(task)).enginecore_doctor(ctx=ctx) or []
    if not isinstance(findings, list) or not all(isinstance(finding, DoctorFinding) for finding in findings):
        return {"raised": f"returned {findings!r}, not a list of enginecore.device.DoctorFinding", "traceback": ""}
    return {"findings": [asdict(finding) for finding in findings]}


_TASKS = {"enginecore_probe": _probe, "enginecore_doctor": _doctor}


if __name__ == "__main__":
    main()
