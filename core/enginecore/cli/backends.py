"""What usable devices say of themselves once their backend is made: ops, memory, and the kit's last result."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from enginecore.config import KV_CACHE_DTYPES
from enginecore.device.manifest import DoctorFinding

if TYPE_CHECKING:
    from enginecore.device.probe import DeviceProbe


@dataclass(frozen=True, kw_only=True)
class BackendFacts:
    """`problem` says why the backend could not be made; `ops` maps native, reference and refused to op names;
    `kv_dtypes` are those that a KV cache may be kept in, by torch's names."""

    ops: dict[str, list[str]] = field(default_factory=dict)
    runtime: bool = False
    memory: dict[str, Any] = field(default_factory=dict)
    kv_dtypes: tuple[str, ...] = ()
    problem: str = ""


def backend_facts(probes: Sequence[DeviceProbe]) -> dict[str, BackendFacts]:
    """By full name, for devices that are there and that have kernels in this version. Backends are made elsewhere."""
    from enginecore.testing.process import Worker

    asked = [p for p in probes if p.result.status.value == "available" and p.result.details.get("serves", True)]
    if not asked:
        return {}
    with Worker() as worker:
        return {probe.full_name: _ask(probe, worker) for probe in asked}


def _ask(probe: DeviceProbe, worker: Any) -> BackendFacts:
    from enginecore.errors import EngineCoreError
    from enginecore.testing.runner import Runner
    from enginecore.testing.support import summary

    try:
        with Runner(probe.full_name, worker=worker) as runner:
            about = runner.describe()
    except EngineCoreError as error:
        return BackendFacts(problem=error.message)
    support = about["support"]
    if "error" in support:
        return BackendFacts(problem=f"its backend cannot say what it supports: {support['error']}")
    kv_dtypes = tuple(about["capabilities"]["kv_dtypes"])
    return BackendFacts(ops=summary(support), runtime=support["runtime"], memory=about["memory"], kv_dtypes=kv_dtypes)


def backend_findings(probe: DeviceProbe, facts: BackendFacts) -> list[DoctorFinding]:
    """Lines of `enginecore doctor` for one device."""
    from enginecore.cli.conformance_results import last_result, told

    last = last_result(probe.full_name)
    fix = "" if last is None or last["ok"] else f"enginecore conformance --device {probe.device} says what fails"
    result = DoctorFinding(name="conformance", ok=not fix, detail=told(last, probe.plugin.version), fix=fix)
    if facts.problem:
        fix = f"pip install --upgrade {probe.plugin.distribution}"
        return [DoctorFinding(name="backend", ok=False, detail=facts.problem, fix=fix), result]
    kept = DoctorFinding(name="KV cache", ok=True, detail=kv_dtypes_told(facts))
    return [*_memory(facts), kept, DoctorFinding(name="ops", ok=True, detail=ops_told(facts)), result]


def ops_told(facts: BackendFacts) -> str:
    """One line: how many ops are native, which run as torch references, which the backend refuses."""
    if facts.problem:
        return "unknown: the backend could not be made"
    if facts.runtime:
        return "whole models: its runtime has no ops of its own"
    parts = []
    for state, ops in facts.ops.items():
        names = f" ({', '.join(ops)})" if ops and state != "native" else ""
        parts.append(f"{len(ops)} {state}{names}")
    return ", ".join(parts)


def kv_dtypes_told(facts: BackendFacts) -> str:
    """One line: what --kv-cache-dtype may be, by the command line's names."""
    if facts.runtime:
        return "the runtime's own"
    names = {torch_name: name for name, torch_name in KV_CACHE_DTYPES.items()}
    return ", ".join(sorted(names.get(dtype, dtype) for dtype in facts.kv_dtypes)) or "none"


def _memory(facts: BackendFacts) -> list[DoctorFinding]:
    if not facts.memory:
        return []
    total, usable, free = (facts.memory[f"{name}_bytes"] / 2**30 for name in ("total", "usable", "free"))
    detail = f"{usable:.1f} GiB usable of {total:.1f} GiB ({facts.memory['source']}), {free:.1f} GiB free"
    return [DoctorFinding(name="device memory", ok=True, detail=detail)]
