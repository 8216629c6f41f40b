"""The hooks of AMD GPUs. This module imports neither torch nor a driver."""

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
    devices=("rocm",),
    distribution="enginecore-rocm",
    version=VERSION,
    contract="1.1",
    summary="AMD GPUs",
    torch_min="2.11",
    torch_variant="rocm",
    torch_install="install the ROCm build of torch: choose ROCm on https://pytorch.org/get-started/locally",
)


@hookimpl
def enginecore_manifest() -> Manifest:
    return MANIFEST


@hookimpl
def enginecore_probe(ctx: ProbeContext) -> ProbeResult:
    from enginecore_rocm.probe import probe

    return probe(ctx, MANIFEST)


@hookimpl
def enginecore_create_backend(ctx: BackendContext) -> Backend:
    from enginecore_rocm.backend import create

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

    from enginecore_rocm.hardware import read_facts
    from enginecore_rocm.probe import JOIN_GROUPS, LOAD_DRIVER

    facts = read_facts()
    gpus = ", ".join(f"{gpu.address} ({gpu.device_id:04x}, driver {gpu.driver})" for gpu in facts.gpus)
    findings = [DoctorFinding(name="AMD GPUs", ok=True, detail=gpus or "none on the PCI bus")]
    if not facts.present:
        return findings
    problem = torch_problem(MANIFEST, ctx.torch_build)
    access = "readable and writable" if facts.writable else "not accessible to this user"
    return [
        *findings,
        DoctorFinding(name="compute targets", ok=True, detail=", ".join(facts.targets) or "none shown by the driver"),
        DoctorFinding(
            name="/dev/kfd",
            ok=facts.writable,
            detail=access if facts.kfd else f"not found (amdgpu driver: {facts.module or 'not loaded'})",
            fix="" if facts.writable else JOIN_GROUPS if facts.kfd else LOAD_DRIVER,
        ),
        DoctorFinding(
            name="torch build",
            ok=problem is None,
            detail=problem.reason if problem else f"torch {ctx.torch_build} fits",
            fix=problem.fix if problem else "",
        ),
        *triton_findings(),
    ]
