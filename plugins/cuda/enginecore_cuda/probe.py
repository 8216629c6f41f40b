"""Is there an NVIDIA GPU that torch can use? Files first, the driver, torch's build, torch itself last."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from enginecore.device import Manifest, ProbeCause, ProbeContext, ProbeResult, ProbeStatus, torch_problem
from enginecore_triton.doctor import told_of_kernels
from packaging.version import InvalidVersion, Version

from enginecore_cuda.hardware import DRIVER_LIBRARY, Facts, read_facts
from enginecore_cuda.visible import mask_hint

INSTALL_DRIVER = "install NVIDIA's driver (Ubuntu: sudo ubuntu-drivers install), reboot, then check with nvidia-smi"
PASS_THROUGH = "start the container with --gpus all and NVIDIA's container toolkit on the host"

#: The oldest driver for each major version of CUDA, by NVIDIA's minor-version compatibility
#: (CUDA Toolkit release notes, table "CUDA Toolkit and Minimum Required Driver Version").
DRIVER_MINIMUM = {12: "525.60.13", 13: "580.65.06"}


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
        return _absent("no NVIDIA GPU on the PCI bus and no /dev/nvidia* device")
    if facts.hidden is not None:
        return _absent(f"CUDA_VISIBLE_DEVICES={facts.hidden!r} hides every GPU", fix="unset CUDA_VISIBLE_DEVICES")
    problem = driver_problem(facts, ctx.torch_build) or torch_problem(manifest, ctx.torch_build)
    if problem is not None:
        return problem
    details = (use_torch or check_torch)()
    details["driver"] = facts.driver
    if not details.get("count"):
        hint = mask_hint(environ)
        told = f"{details.get('error') or 'none reported'}{hint and f'; {hint}'}"
        fix = "compare with nvidia-smi -L" if hint else "compare with nvidia-smi"
        return _broken(
            f"torch {ctx.torch_build} finds no usable GPU: {told}",
            f"{fix}; a reboot is needed after a driver update",
            ProbeCause.FAILED,
        )
    names = ", ".join(device["name"] for device in details["devices"])
    found = ProbeResult(status=ProbeStatus.AVAILABLE, reason=f"{names}, driver {facts.driver}", details=details)
    return told_of_kernels(found)


def driver_problem(facts: Facts, torch_build: str | None) -> ProbeResult | None:
    """What is wrong below torch, told from files; None when nothing is."""
    what = facts.integrated or f"{len(facts.gpus) or len(facts.nodes)} NVIDIA GPU(s)"
    if not facts.integrated and facts.driver is None:
        bound = sorted({gpu.driver for gpu in facts.gpus if gpu.driver})
        held = f" (bound to {', '.join(bound)})" if bound else ""
        return _broken(f"{what} found{held}, but NVIDIA's kernel driver is not loaded", INSTALL_DRIVER)
    if not facts.integrated and not facts.nodes:
        return _broken(f"{what} found and the driver is loaded, but there is no /dev/nvidia0 here", PASS_THROUGH)
    if facts.library is None:
        return _broken(
            f"{what} found, but the driver library {DRIVER_LIBRARY} is not",
            f"{INSTALL_DRIVER}; in a container: {PASS_THROUGH}",
        )
    minimum = driver_minimum(torch_build)
    if facts.driver and minimum and _older(facts.driver, minimum):
        return _broken(
            f"driver {facts.driver} is older than {minimum}, which torch {torch_build} needs", INSTALL_DRIVER
        )
    return None


def driver_minimum(torch_build: str | None) -> str | None:
    """The oldest driver for a build such as "2.13.0+cu130" or "+cu13.0"; None when it cannot be told."""
    match = re.search(r"\+cu(\d\d)", torch_build or "")
    return DRIVER_MINIMUM.get(int(match.group(1))) if match else None


def _older(version: str, minimum: str) -> bool:
    try:
        return Version(version) < Version(minimum)
    except InvalidVersion:
        return False


def check_torch() -> dict[str, Any]:
    """Loads torch and computes something on every GPU; `error` says what went wrong."""
    import torch

    try:
        devices = []
        for index in range(torch.cuda.device_count()):
            properties = torch.cuda.get_device_properties(index)
            if float(torch.ones(8, device=f"cuda:{index}").sum()) != 8.0:
                return {"count": 0, "error": f"GPU {index} computed a wrong sum"}
            capability = f"{properties.major}.{properties.minor}"
            devices.append({"name": properties.name, "memory": properties.total_memory, "capability": capability})
        if not devices:
            torch.cuda.init()  # raises with the reason
        return {"count": len(devices), "devices": devices, "toolkit": torch.version.cuda}
    except (RuntimeError, AssertionError) as error:
        return {"count": 0, "error": str(error).strip().splitlines()[0]}


def _absent(reason: str, fix: str = "") -> ProbeResult:
    return ProbeResult(status=ProbeStatus.ABSENT, reason=reason, fix=fix, cause=ProbeCause.NO_DEVICE)


def _broken(reason: str, fix: str, cause: ProbeCause = ProbeCause.DRIVER_MISSING) -> ProbeResult:
    return ProbeResult(status=ProbeStatus.BROKEN, reason=reason, fix=fix, cause=cause)
