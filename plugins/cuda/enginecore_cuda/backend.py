"""The CUDA backend: torch's allocator, streams and graphs, Triton's kernels."""

from __future__ import annotations

from enginecore.device import AttentionBackend, BackendContext, Capabilities
from enginecore.device.accelerator import AcceleratorBackend, PooledMemory, Runtime, collectives_of, gpu_memory
from enginecore_triton import DeviceDescription
from enginecore_triton.parts import equip

from enginecore_cuda.capabilities import FLOAT8, Gpu, capabilities_of
from enginecore_cuda.nvml import ProcessBooks
from enginecore_cuda.visible import mask_hint, slice_of

#: What the driver's context and the libraries' kernels take of a device, where the driver does not say it.
CONTEXT_BYTES = 512 * 2**20

#: Errors of libraries beside torch's allocator that mean exhausted memory.
SIGNS = ("CUDA error: out of memory", "CUBLAS_STATUS_ALLOC_FAILED", "CUDNN_STATUS_ALLOC_FAILED")


class CudaBackend(AcceleratorBackend):
    """`options`, for comparisons: "kernels" ("triton", or "torch" for the references)."""

    def __init__(self, ctx: BackendContext, runtime: Runtime, gpu: Gpu | None = None) -> None:
        """`gpu` is asked of torch unless it is given, as tests do, whose runtime is a device of books only."""
        super().__init__("cuda", runtime, ctx.index, hint=mask_hint())
        self.collective_backend = collectives_of("nccl")
        self.gpu = gpu or Gpu.of(runtime.properties())
        self.memory = make_memory(self.gpu, runtime)
        description = DeviceDescription(
            architecture=self.gpu.architecture,
            multiprocessors=self.gpu.multiprocessors,
            warp_size=32,
            native_fp8=self.gpu.capability >= FLOAT8,
        )

        def claim(computed: Capabilities, graphs: bool) -> Capabilities:
            ranks = runtime.device_count() if self.collective_backend else 1
            return capabilities_of(self.gpu, computed, graphs=graphs, world_size=ranks)

        def improve(kernels: AttentionBackend) -> AttentionBackend:
            from enginecore_cuda.attention import with_providers

            return with_providers(kernels, self.gpu.architecture)

        why_not = "the option kernels says so" if ctx.options.get("kernels") == "torch" else ""
        equip(self, description, claim, why_not, improve)


def make_memory(gpu: Gpu, runtime: Runtime) -> PooledMemory:
    """A partition's own memory where it is one; the container's limit where the GPU shares the host's memory."""
    profile, books = slice_of(gpu.name), ProcessBooks(gpu.uuid)
    source = f"MIG slice {profile}" if profile else f"memory of {gpu.name}"
    return gpu_memory(
        runtime,
        source=source,
        integrated=gpu.integrated,
        driver_bytes=books.bytes_of,
        context_bytes=CONTEXT_BYTES,
        signs=SIGNS,
    )


def create(ctx: BackendContext) -> CudaBackend:
    import torch
    from enginecore.device.accelerator import TorchRuntime

    # Threads that copy blocks meanwhile may go on; what they do is not recorded.
    runtime = TorchRuntime(torch.cuda, "cuda", "CUDAGraph", capture_error_mode="thread_local")
    return CudaBackend(ctx, runtime)
