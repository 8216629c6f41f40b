"""The ROCm backend: torch's allocator, streams and graphs (it answers as torch.cuda there), Triton's kernels.

HIP_VISIBLE_DEVICES and ROCR_VISIBLE_DEVICES are the runtime's to read: an index counts the devices that they leave.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from enginecore.device import BackendContext, Capabilities
from enginecore.device.accelerator import AcceleratorBackend, PooledMemory, Runtime, collectives_of, gpu_memory
from enginecore_triton import DeviceDescription
from enginecore_triton.parts import equip

from enginecore_rocm.capabilities import Gpu, capabilities_of

#: What the runtime's queues and the libraries' kernels take of a device, where the kernel driver does not say it.
CONTEXT_BYTES = 512 * 2**20

#: Errors of libraries beside torch's allocator that mean exhausted memory.
SIGNS = ("HIP error: out of memory", "HIPBLAS_STATUS_ALLOC_FAILED", "HSA_STATUS_ERROR_OUT_OF_RESOURCES")


class RocmBackend(AcceleratorBackend):
    """`options`, for comparisons: "kernels" ("triton", or "torch" for the references)."""

    def __init__(self, ctx: BackendContext, runtime: Runtime, gpu: Gpu | None = None) -> None:
        """`gpu` is asked of torch unless it is given, as tests do, whose runtime is a device of books only."""
        super().__init__("rocm", runtime, ctx.index, hint=mask_hint())
        self.collective_backend = collectives_of("nccl")
        self.gpu = gpu or Gpu.of(runtime.properties())
        self.memory = make_memory(self.gpu, runtime)
        description = DeviceDescription(
            architecture=self.gpu.target,
            multiprocessors=self.gpu.multiprocessors,
            warp_size=self.gpu.wave,
            # Elsewhere the kernels unpack e4m3 by arithmetic: fnuz hardware would read other numbers.
            native_fp8=self.gpu.row.float8 == "ocp",
        )

        def claim(computed: Capabilities, graphs: bool) -> Capabilities:
            ranks = runtime.device_count() if self.collective_backend else 1
            return capabilities_of(self.gpu, computed, graphs=graphs, world_size=ranks)

        equip(self, description, claim, "the option kernels says so" if ctx.options.get("kernels") == "torch" else "")


def make_memory(gpu: Gpu, runtime: Runtime) -> PooledMemory:
    source = f"memory of {gpu.name}"
    return gpu_memory(
        runtime,
        source=source,
        integrated=gpu.integrated,
        driver_bytes=driver_bytes,
        context_bytes=CONTEXT_BYTES,
        signs=SIGNS,
    )


def driver_bytes(root: Path = Path("/"), pid: int | None = None) -> int | None:
    """What a process (this one) holds in all GPUs together, as the compute driver counts it; None when it does not
    know the process, as in a container that has process numbers of its own."""
    folder = root / "sys/class/kfd/kfd/proc" / str(os.getpid() if pid is None else pid)
    try:
        sizes = [int(path.read_text()) for path in folder.glob("vram_*")]
    except (OSError, ValueError):
        return None
    return sum(sizes) if any(sizes) else None


def mask_hint(environ: Mapping[str, str] = os.environ) -> str:
    masks = [f"{name}={environ[name]!r}" for name in ("ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES") if name in environ]
    return ", ".join(masks)


def create(ctx: BackendContext) -> RocmBackend:
    import torch
    from enginecore.device.accelerator import TorchRuntime

    # Threads that copy blocks meanwhile may go on; what they do is not recorded.
    runtime = TorchRuntime(torch.cuda, "cuda", "CUDAGraph", capture_error_mode="thread_local")
    return RocmBackend(ctx, runtime)
