"""Is there an AMD GPU that torch can use? Files first, the driver, torch's build, torch itself last.

The user-space driver (HIP, HSA) comes inside torch's ROCm wheels: below torch only the kernel's part can be missing.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from enginecore.device import Manifest, ProbeCause, ProbeContext, ProbeResult, ProbeStatus, torch_problem
from enginecore_triton.doctor import told_of_kernels

from enginecore_rocm.hardware import Facts, read_facts

LOAD_DRIVER = (
    "load the kernel driver (sudo modprobe amdgpu) or install AMD's; "
    "in a container add --device /dev/kfd --device /dev/dri"
)
JOIN_GROUPS = "sudo usermod -aG render,video $USER, then log in again; in a container add --group-add render"

#: What torch's ROCm wheels hold code for (the architecture list of its release builds).
TARGETS = frozenset(
    {"gfx900", "gfx906", "gfx908", "gfx90a", "gfx942", "gfx950", "gfx1030"}
    | {"gfx1100", "gfx1101", "gfx1102", "gfx1150", "gfx1151", "gfx1200", "gfx1201"}
)


def probe(
    ctx: ProbeContext,
    manifest: Manifest,
    *,
    root: Path = Path("/"),
    environ: Mapping[str, str] = os.environ,
    use_torch: Callable[[], dict[str, Any]] | None = None,
) -> ProbeResult:
    """`root`, `environ` and `use_torch` are there for tests."""
    facts = read_facts(root, environ)
    if not facts.present:
        return _absent("no AMD GPU on the PCI bus and none shown by the compute driver")
    if facts.hidden is not None:
        return _absent(f"{facts.hidden} hides every GPU", fix="unset " + facts.hidden.partition("=")[0])
    if facts.targets and not facts.override and not TARGETS.intersection(facts.targets):
        return _absent(f"{', '.join(facts.targets)} found, which torch's ROCm builds have no code for")
    problem = driver_problem(facts) or torch_problem(manifest, ctx.torch_build)
    if problem is not None:
        return problem
    details = (use_torch or check_torch)()
    details["targets"] = list(facts.targets)
    if not details.get("count"):
        reason = f"torch {ctx.torch_build} finds no usable GPU: {details.get('error') or 'none reported'}"
        return _broken(reason, "compare with rocminfo", ProbeCause.FAILED)
    names = ", ".join(device["name"] for device in details["devices"])
    found = ProbeResult(status=ProbeStatus.AVAILABLE, reason=f"{names} ({', '.join(facts.targets)})", details=details)
    return told_of_kernels(found)


def driver_problem(facts: Facts) -> ProbeResult | None:
    """What is wrong below torch, told from files; None when nothing is."""
    what = ", ".join(facts.targets) or f"{len(facts.gpus)} AMD GPU(s)"
    if facts.kfd is None:
        state = f"amdgpu {facts.module} is loaded" if facts.module else "the amdgpu driver is not loaded"
        return _broken(f"{what} found, but there is no /dev/kfd here ({state})", LOAD_DRIVER)
    if not facts.writable:
        return _broken(f"{what} found, but this user may not open /dev/kfd", JOIN_GROUPS)
    return None


def check_torch() -> dict[str, Any]:
    """Loads torch and computes something on every GPU; `error` says what went wrong. ROCm answers as torch.cuda."""
    import torch

    try:
        devices = []
        for index in range(torch.cuda.device_count()):
            properties = torch.cuda.get_device_properties(index)
            if float(torch.ones(8, device=f"cuda:{index}").sum()) != 8.0:
                return {"count": 0, "error": f"GPU {index} computed a wrong sum"}
            target = getattr(properties, "gcnArchName", "")
            devices.append({"name": properties.name, "memory": properties.total_memory, "target": target})
        if not devices:
            torch.cuda.init()  # raises with the reason
        return {"count": len(devices), "devices": devices, "toolkit": torch.version.hip}
    except (RuntimeError, AssertionError) as error:
        return {"count": 0, "error": str(error).strip().splitlines()[0]}


def _absent(reason: str, fix: str = "") -> ProbeResult:
    return ProbeResult(status=ProbeStatus.ABSENT, reason=reason, fix=fix, cause=ProbeCause.NO_DEVICE)


def _broken(reason: str, fix: str, cause: ProbeCause = ProbeCause.DRIVER_MISSING) -> ProbeResult:
    return ProbeResult(status=ProbeStatus.BROKEN, reason=reason, fix=fix, cause=cause)
