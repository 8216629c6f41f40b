"""Ask plugins about this machine, each in a process of its own, so that whatever a driver does there stays there.

A probe that raises, hangs, crashes, exits or answers nonsense becomes a BROKEN result that names the distribution, what
happened and what to type.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import Any

from enginecore.device.child import run_child
from enginecore.device.discovery import InstalledPlugin, upgrade_fix
from enginecore.device.manifest import DoctorFinding, ProbeCause, ProbeResult, ProbeStatus

PROBE_TIMEOUT_S = 60.0

_MAX_WORKERS = 8


@dataclass(frozen=True, kw_only=True)
class DeviceProbe:
    """One device of one plugin and what its probe said."""

    plugin: InstalledPlugin
    device: str
    result: ProbeResult

    @property
    def full_name(self) -> str:
        return self.plugin.full_name(self.device)


@dataclass(frozen=True, kw_only=True)
class _Answer:
    """A hook's answer, or why there is none (with a traceback or the end of its process's stderr)."""

    answer: dict[str, Any] | None
    reason: str = ""
    trace: str = ""


def probe_all(plugins: Sequence[InstalledPlugin], *, timeout_s: float = PROBE_TIMEOUT_S) -> list[DeviceProbe]:
    """Probe every device of `plugins`, several at a time. A plugin with a fault is BROKEN without a probe."""
    pairs = [(plugin, device) for plugin in plugins for device in plugin.devices]
    if not pairs:
        return []
    with ThreadPoolExecutor(max_workers=min(_MAX_WORKERS, len(pairs))) as pool:
        results = list(pool.map(lambda pair: probe(*pair, timeout_s=timeout_s), pairs))
    return [DeviceProbe(plugin=p, device=d, result=result) for (p, d), result in zip(pairs, results, strict=True)]


def probe(plugin: InstalledPlugin, device: str, *, timeout_s: float = PROBE_TIMEOUT_S) -> ProbeResult:
    """The result of one probe; never raises on account of the plugin."""
    if plugin.fault is not None:
        details = {"traceback": plugin.fault.traceback} if plugin.fault.traceback else {}
        reason = f"{plugin.label}: {plugin.fault.reason}"
        return _broken(reason, plugin.fault.fix, cause=plugin.fault.cause, details=details)
    ended = _run(plugin, device, "enginecore_probe", timeout_s)
    if ended.answer is None:
        fix = upgrade_fix(plugin)
        details = {"traceback": ended.trace} if ended.trace else {}
        return _broken(f"{plugin.label}: the probe of {device!r} {ended.reason}", fix, details=details)
    found = ended.answer["probe"]
    found["status"], found["cause"] = ProbeStatus(found["status"]), ProbeCause(found["cause"])
    if found["status"] is ProbeStatus.BROKEN:
        found["reason"] = f"{plugin.label}: {found['reason']}"
        found["fix"] = found["fix"] or "run enginecore doctor, or choose another --device"
        found["cause"] = ProbeCause.FAILED if found["cause"] is ProbeCause.NONE else found["cause"]
    return ProbeResult(**found)


def run_doctor(plugin: InstalledPlugin, device: str, *, timeout_s: float = PROBE_TIMEOUT_S) -> list[DoctorFinding]:
    """The plugin's own checks; a hook that fails is itself a finding."""
    ended = _run(plugin, device, "enginecore_doctor", timeout_s)
    if ended.answer is None:
        detail = f"the doctor hook of {plugin.label} {ended.reason}" + (f"\n{ended.trace}" if ended.trace else "")
        fix = f"pip install --upgrade {plugin.distribution}"
        return [DoctorFinding(name=f"{device} checks", ok=False, detail=detail, fix=fix)]
    return [DoctorFinding(**finding) for finding in ended.answer["findings"]]


def _broken(
    reason: str, fix: str, *, cause: ProbeCause = ProbeCause.FAILED, details: dict[str, Any] | None = None
) -> ProbeResult:
    return ProbeResult(status=ProbeStatus.BROKEN, reason=reason, fix=fix, cause=cause, details=details or {})


def _run(plugin: InstalledPlugin, device: str, hook: str, timeout_s: float) -> _Answer:
    task = {
        "hook": hook,
        "plugin": plugin.identity,
        "manifest": asdict(plugin.manifest) if plugin.manifest else {},
        "device": device,
        "timeout_s": timeout_s,
    }
    ended = run_child("enginecore.device.probe_main", task, timeout_s)
    try:
        answer = json.loads(ended.out)
    except ValueError:
        return _Answer(answer=None, reason=ended.reason, trace=ended.trace)
    if "raised" in answer:
        return _Answer(answer=None, reason=answer["raised"], trace=answer["traceback"])
    return _Answer(answer=answer)
