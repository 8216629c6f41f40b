"""The hooks that enginecore calls. This module imports neither torch nor the compiled kernels."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from enginecore.device.hookspecs import hookimpl
from enginecore.device.manifest import (
    BackendContext,
    ConfigContext,
    DoctorContext,
    DoctorFinding,
    Manifest,
    ProbeCause,
    ProbeContext,
    ProbeResult,
    ProbeStatus,
)

from enginecore_cpu import __version__, native, system

if TYPE_CHECKING:
    from enginecore.device.backend import Backend

#: A cache larger than this share of the machine would push out the page cache that the weights are read through.
MEMORY_UTILIZATION = 0.4
#: Tokens a step. With twice as many the rows between two products no longer stay in the second-level caches (int8: 9
#: percent less throughput), and a prompt holds up its neighbours' next tokens for twice as long; with half as many the
#: weights are read once more for too few rows.
BATCHED_TOKENS = 256

REINSTALL = (
    "install a C++17 compiler (g++ or clang++) and Python's headers, "
    "then: pip install --force-reinstall --no-deps enginecore-cpu"
)


@hookimpl
def enginecore_manifest() -> Manifest:
    return Manifest(
        devices=("cpu",),
        distribution="enginecore-cpu",
        version=__version__,
        contract="1.1",
        summary="x86-64 (AVX2, AVX-512, AVX-512 BF16) and ARM64 processors",
        torch_min="2.11",
        accelerator=False,
    )


@hookimpl
def enginecore_probe(ctx: ProbeContext) -> ProbeResult:
    if ctx.torch_build is None:
        return ProbeResult(
            status=ProbeStatus.BROKEN,
            reason="torch is not installed",
            fix="pip install torch",
            cause=ProbeCause.WRONG_TORCH,
        )
    kernels, why = native.status()
    budget = system.cpu_budget()
    details = {
        "isa": list(system.isa_flags()),
        "threads": budget.threads,
        "kernels": kernels,
        "model": system.cpu_model(),
    }
    reason = f"{system.cpu_model()}, {budget.threads} threads ({budget.source}), kernels: {kernels}"
    if why:
        return ProbeResult(status=ProbeStatus.AVAILABLE, reason=f"{reason} ({why})", fix=REINSTALL, details=details)
    return ProbeResult(status=ProbeStatus.AVAILABLE, reason=reason, details=details)


@hookimpl
def enginecore_create_backend(ctx: BackendContext) -> Backend:
    from enginecore_cpu.backend import CpuBackend

    return CpuBackend(ctx)


@hookimpl
def enginecore_config_defaults(ctx: ConfigContext) -> dict[str, Any]:
    return {
        "max_num_batched_tokens": BATCHED_TOKENS,
        "max_num_seqs": 128,
        "memory_utilization": MEMORY_UTILIZATION,
        "dtype": "bfloat16" if system.has_bfloat16() else "float32",
    }


@hookimpl
def enginecore_doctor(ctx: DoctorContext) -> list[DoctorFinding]:
    kernels, why = native.status()
    budget, limit = system.cpu_budget(), system.memory_limit()
    compiler = system.find_compiler()
    return [
        DoctorFinding(
            name="native kernels",
            ok=not why,
            detail=why or f"compiled, using {kernels}",
            fix=REINSTALL if why else "",
        ),
        DoctorFinding(
            name="C++ compiler",
            ok=compiler is not None,
            detail=compiler or "none found in PATH",
            fix="" if compiler else "install g++ or clang++",
        ),
        DoctorFinding(name="instruction sets", ok=True, detail=", ".join(system.isa_flags()) or "baseline only"),
        DoctorFinding(
            name="threads", ok=True, detail=f"{budget.threads} ({budget.source}; {budget.host} in the machine)"
        ),
        DoctorFinding(name="memory limit", ok=True, detail=f"{limit.bytes / 2**30:.1f} GiB ({limit.source})"),
    ]


@hookimpl
def enginecore_conformance_profile() -> Any:
    """The kit's own tolerances hold, and there are no gaps; what is not claimed is looked at again by a day."""
    from enginecore.testing import ConformanceProfile

    return ConformanceProfile(skips_expire="2027-12-31")
