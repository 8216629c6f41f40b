"""What building kernels needs on a machine, told from files: nothing of Triton is loaded."""

from __future__ import annotations

import importlib.util
import os
import shutil
import sysconfig
from dataclasses import replace
from importlib import metadata
from pathlib import Path

from enginecore.device import DoctorFinding, ProbeResult

#: Distributions that bring the module `triton`, Intel's among them.
DISTRIBUTIONS = ("triton", "triton-xpu", "triton-rocm", "pytorch-triton-rocm", "pytorch-triton-xpu", "pytorch-triton")


def triton_findings() -> list[DoctorFinding]:
    """Triton itself, and the C compiler and headers with which it builds the code that launches a kernel."""
    found = importlib.util.find_spec("triton") is not None
    compiler = os.environ.get("CC") or next(filter(None, map(shutil.which, ("cc", "gcc", "clang"))), None)
    header = Path(sysconfig.get_paths()["include"]) / "Python.h"
    slow = "without it everything runs as torch references, slowly"
    return [
        DoctorFinding(
            name="Triton",
            ok=found,
            detail=_version() if found else f"not installed; {slow}",
            fix="" if found else "install the torch build of your device, which brings its Triton",
        ),
        DoctorFinding(
            name="C compiler for Triton",
            ok=compiler is not None,
            detail=compiler or f"none found in PATH; {slow}",
            fix="" if compiler else "install gcc or clang, or set CC",
        ),
        DoctorFinding(
            name="Python headers for Triton",
            ok=header.exists(),
            detail=str(header) if header.exists() else f"{header} is missing; {slow}",
            fix="" if header.exists() else "install Python's development files (Ubuntu: sudo apt install python3-dev)",
        ),
    ]


def told_of_kernels(result: ProbeResult) -> ProbeResult:
    """`result` of a usable device, with what kernels lack here: it serves without them, slowly."""
    missing = [finding for finding in triton_findings() if not finding.ok]
    if not missing:
        return result
    told = "; ".join(f"{finding.name}: {finding.detail}" for finding in missing)
    return replace(result, reason=f"{result.reason} ({told})", fix=missing[0].fix)


def _version() -> str:
    installed = {distribution.name: distribution.version for distribution in metadata.distributions()}
    return next((f"{name} {installed[name]}" for name in DISTRIBUTIONS if name in installed), "installed")
