"""The hooks of Intel GPUs. This module imports neither torch nor a driver."""

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
    devices=("xpu",),
    distribution="enginecore-xpu",
    version=VERSION,
    contract="1.1",
    summary="Intel GPUs",
    torch_min="2.11",
    torch_variant="xpu",
    torch_install="install the XPU build of torch: choose XPU on https://pytorch.org/get-started/locally",
)


@hookimpl
def enginecore_manifest() -> Manifest:
    return MANIFEST


@hookimpl
def enginecore_probe(ctx: ProbeContext) -> ProbeResult:
    from enginecore_xpu.probe import probe

    return probe(ctx, MANIFEST)


@hookimpl
def enginecore_create_backend(ctx: BackendContext) -> Backend:
    from enginecore_xpu.backend import create

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

    from enginecore_xpu.hardware import family, read_facts
    from enginecore_xpu.probe import driver_problem

    facts = read_facts()
    gpus = [f"{gpu.address}: {family(gpu.device_id)}, driver {gpu.driver}" for gpu in facts.gpus]
    gpus += [f"{gpu.address}: {gpu.device_id:04x}, which torch does not support" for gpu in facts.others]
    findings = [DoctorFinding(name="Intel GPUs", ok=True, detail=", ".join(gpus) or "none on the PCI bus")]
    if not facts.gpus:
        return findings
    checks = (("Intel GPU driver", driver_problem(facts)), ("torch build", torch_problem(MANIFEST, ctx.torch_build)))
    return [
        *findings,
        *(
            DoctorFinding(
                name=name,
                ok=problem is None,
                detail=problem.reason if problem else "in order",
                fix=problem.fix if problem else "",
            )
            for name, problem in checks
        ),
        *triton_findings(),
    ]
