"""The hooks of NVIDIA GPUs. This module imports neither torch nor a driver."""

from __future__ import annotations

from typing import Any

from enginecore import hookimpl
from enginecore.device import (
    Backend,
    BackendContext,
    DoctorContext,
    DoctorFinding,
    Manifest,
    ProbeContext,
    ProbeResult,
    torch_problem,
)

VERSION = "0.1.0"

MANIFEST = Manifest(
    devices=("cuda",),
    distribution="enginecore-cuda",
    version=VERSION,
    contract="1.1",
    summary="NVIDIA GPUs",
    torch_min="2.11",
    torch_variant="cu",
    driver_min="525.60.13",
    torch_install="install the CUDA build of torch: choose CUDA on https://pytorch.org/get-started/locally",
)


@hookimpl
def enginecore_manifest() -> Manifest:
    return MANIFEST


@hookimpl
def enginecore_probe(ctx: ProbeContext) -> ProbeResult:
    from enginecore_cuda.probe import probe

    return probe(ctx, MANIFEST)


@hookimpl
def enginecore_create_backend(ctx: BackendContext) -> Backend:
    from enginecore_cuda.backend import create

    return create(ctx)


@hookimpl
def enginecore_conformance_profile() -> Any:
    """The kit's own tolerances hold, and there are no gaps; what is not claimed is looked at again by
    that day. Kernels compile on their first use."""
    from enginecore.testing import ConformanceProfile

    return ConformanceProfile(skips_expire="2027-12-31", timeout_scale=4)


@hookimpl
def enginecore_doctor(ctx: DoctorContext) -> list[DoctorFinding]:
    from enginecore_triton.doctor import triton_findings

    from enginecore_cuda.hardware import DRIVER_LIBRARY, read_facts
    from enginecore_cuda.probe import INSTALL_DRIVER, PASS_THROUGH, driver_problem

    facts = read_facts()
    gpus = ", ".join(f"{gpu.address} ({gpu.device_id:04x}, driver {gpu.driver})" for gpu in facts.gpus)
    findings = [DoctorFinding(name="NVIDIA GPUs", ok=True, detail=gpus or facts.integrated or "none on the PCI bus")]
    if not facts.present:
        return findings
    problem = driver_problem(facts, ctx.torch_build) or torch_problem(MANIFEST, ctx.torch_build)
    nodes, driver, library = ", ".join(facts.nodes), facts.driver, facts.library
    return [
        *findings,
        _finding("NVIDIA kernel driver", driver or facts.integrated, INSTALL_DRIVER),
        _finding("NVIDIA device files", nodes or facts.integrated, PASS_THROUGH),
        _finding(DRIVER_LIBRARY, library, INSTALL_DRIVER),
        DoctorFinding(
            name="driver and torch build",
            ok=problem is None,
            detail=problem.reason if problem else f"torch {ctx.torch_build} fits",
            fix=problem.fix if problem else "",
        ),
        *triton_findings(),
    ]


def _finding(name: str, found: str | None, fix: str) -> DoctorFinding:
    return DoctorFinding(name=name, ok=bool(found), detail=found or "not found", fix="" if found else fix)
