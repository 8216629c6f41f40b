"""The XPU backend: torch.xpu's allocator, streams and, where this torch has them, SYCL graphs; Triton's kernels when
Intel's build of Triton is installed, torch's references otherwise."""

from __future__ import annotations

from enginecore.device import BackendContext, Capabilities
from enginecore.device.accelerator import (
    AcceleratorBackend,
    PooledMemory,
    Runtime,
    TorchRuntime,
    collectives_of,
    gpu_memory,
)
from enginecore.device.hardware import drm_process_bytes
from enginecore.errors import UnsupportedError
from enginecore_triton import DeviceDescription
from enginecore_triton.parts import equip

from enginecore_xpu.capabilities import Gpu, capabilities_of

#: What the driver's context and kernels take of a device, where the kernel driver does not say it.
CONTEXT_BYTES = 256 * 2**20

#: Errors beside those of torch's allocator that mean exhausted memory (Unified Runtime, Level Zero).
SIGNS = (
    "UR_RESULT_ERROR_OUT_OF_DEVICE_MEMORY",
    "UR_RESULT_ERROR_OUT_OF_RESOURCES",
    "ZE_RESULT_ERROR_OUT_OF_DEVICE_MEMORY",
)

EMULATE = (
    "export OverrideDefaultFP64Settings=1 IGC_EnableDPEmulation=1 (emulation by Intel's compiler), then start again"
)


class XpuRuntime(TorchRuntime):
    """Some drivers do not say how much is free: then it is what this process does not hold."""

    def memory_info(self) -> tuple[int, int]:
        try:
            return super().memory_info()
        except RuntimeError:
            total = int(self.properties().total_memory)
            return total - self.reserved_bytes(), total


class XpuBackend(AcceleratorBackend):
    """`options`, for comparisons: "kernels" ("triton", or "torch" for the references)."""

    def __init__(self, ctx: BackendContext, runtime: Runtime, gpu: Gpu | None = None) -> None:
        """`gpu` is asked of torch unless it is given, as tests do, whose runtime is a device of books only."""
        super().__init__("xpu", runtime, ctx.index)
        self.collective_backend = collectives_of("xccl")
        self.gpu = gpu or Gpu.of(runtime.properties())
        if not self.gpu.float64:
            raise UnsupportedError(f"{self.gpu.name} has no double precision, which sampling computes in", fix=EMULATE)
        self.memory = make_memory(self.gpu, runtime)
        description = DeviceDescription(architecture="xpu", multiprocessors=self.gpu.cores, warp_size=32)

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
        driver_bytes=drm_process_bytes,
        context_bytes=CONTEXT_BYTES,
        signs=SIGNS,
    )


def create(ctx: BackendContext) -> XpuBackend:
    import torch

    return XpuBackend(ctx, XpuRuntime(torch.xpu, "xpu", "XPUGraph"))
