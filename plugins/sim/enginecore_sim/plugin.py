"""The hooks of the simulated device. It is never chosen by `--device auto`."""

from __future__ import annotations

from typing import Any

from enginecore import hookimpl
from enginecore.device import Backend, BackendContext, Manifest, ProbeContext, ProbeResult, ProbeStatus


@hookimpl
def enginecore_manifest() -> Manifest:
    return Manifest(
        devices=("sim",),
        distribution="enginecore-sim",
        version="0.1.0",
        contract="1.1",
        summary="Simulated device: scripted tokens through a real paged cache, modelled time, no weights",
        accelerator=False,
        auto=False,
        simulated=True,
    )


@hookimpl
def enginecore_probe(ctx: ProbeContext) -> ProbeResult:
    return ProbeResult(status=ProbeStatus.AVAILABLE, reason="a simulation is always there", details={"count": 1})


@hookimpl
def enginecore_create_backend(ctx: BackendContext) -> Backend:
    from enginecore_sim.backend import SimBackend

    return SimBackend(ctx)


@hookimpl
def enginecore_conformance_profile() -> Any:
    """It computes nothing, so most of the kit has nothing to compare; that is looked at again by a day."""
    from enginecore.testing import ConformanceProfile

    return ConformanceProfile(skips_expire="2027-12-31")
