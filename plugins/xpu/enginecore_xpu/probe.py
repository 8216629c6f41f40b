"""Is there an Intel GPU that torch can use? Files first, the driver, torch's build, torch itself last."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from enginecore.device import Manifest, ProbeCause, ProbeContext, ProbeResult, ProbeStatus, torch_problem
from enginecore_triton.doctor import told_of_kernels

from enginecore_xpu.hardware import Facts, family, read_facts

LOAD_DRIVER = "load the kernel driver (sudo modprobe xe, or i915); in a container add --device /dev/dri"
JOIN_GROUP = "sudo usermod -aG render $USER, then log in again; in a container add --group-add render"
INSTALL_LIBRARIES = "install Intel's Level Zero driver (Ubuntu: sudo apt install libze1 libze-intel-gpu1)"


def probe(
    ctx: ProbeContext,
    manifest: Manifest,
    *,
    root: Path = Path("/"),
    use_torch: Callable[[], dict[str, Any]] | None = None,
) -> ProbeResult:
    """`root` and `use_torch` are there for tests."""
    facts = read_facts(root)
    if not facts.gpus:
        others = ", ".join(f"{gpu.device_id:04x}" for gpu in facts.others)
        seen = f" (older integrated graphics {others} found)" if others else ""
        return ProbeResult(
            status=ProbeStatus.ABSENT,
            reason=f"no Intel GPU that torch supports on the PCI bus{seen}",
            cause=ProbeCause.NO_DEVICE,
        )
    problem = driver_problem(facts) or torch_problem(manifest, ctx.torch_build)
    if problem is not None:
        return problem
    details = (use_torch or check_torch)()
    if not details.get("count"):
        reason = f"torch {ctx.torch_build} finds no usable GPU: {details.get('error') or 'none reported'}"
        return _broken(reason, "compare with clinfo -l and sycl-ls", ProbeCause.FAILED)
    names = ", ".join(device["name"] for device in details["devices"])
    found = ProbeResult(status=ProbeStatus.AVAILABLE, reason=names, details=details)
    return told_of_kernels(found)


def driver_problem(facts: Facts) -> ProbeResult | None:
    """What is wrong below torch, told from files; None when nothing is."""
    what = ", ".join(sorted({str(family(gpu.device_id)) for gpu in facts.gpus}))
    if not facts.nodes:
        bound = sorted({gpu.driver for gpu in facts.gpus if gpu.driver})
        held = f"bound to {', '.join(bound)}" if bound else "bound to no driver"
        return _broken(f"{what} found ({held}), but there is no /dev/dri/renderD* of it here", LOAD_DRIVER)
    if not facts.writable:
        return _broken(f"{what} found, but this user may not open {facts.nodes[0]}", JOIN_GROUP)
    if facts.missing:
        return _broken(f"{what} found, but the driver library {facts.missing[0]} is not", INSTALL_LIBRARIES)
    return None


def check_torch() -> dict[str, Any]:
    """Loads torch and computes something on every GPU; `error` says what went wrong."""
    import torch

    try:
        devices = []
        for index in range(torch.xpu.device_count()):
            properties = torch.xpu.get_device_properties(index)
            if float(torch.ones(8, device=f"xpu:{index}").sum()) != 8.0:
                return {"count": 0, "error": f"GPU {index} computed a wrong sum"}
            devices.append({"name": properties.name, "memory": properties.total_memory})
        if not devices:
            torch.xpu.init()  # raises with the reason
        return {"count": len(devices), "devices": devices, "toolkit": torch.version.xpu}
    except (RuntimeError, AssertionError) as error:
        return {"count": 0, "error": str(error).strip().splitlines()[0]}


def _broken(reason: str, fix: str, cause: ProbeCause = ProbeCause.DRIVER_MISSING) -> ProbeResult:
    return ProbeResult(status=ProbeStatus.BROKEN, reason=reason, fix=fix, cause=cause)
