"""What backends of accelerators that torch drives share: books of memory, graphs, copies beside the step, guards.

A plugin brings a runtime (`TorchRuntime` over torch's module of its device, or an object of its own with the same
methods) and puts these parts together in its `Backend`. Nothing here knows which device it is, and nothing loads torch
before a part is used, so that all of it can be tried on a machine without one (see `Runtime`).
"""

from enginecore.device.accelerator.backend import AcceleratorBackend, collectives_of
from enginecore.device.accelerator.graphs import GraphCaptureError, PooledGraphs
from enginecore.device.accelerator.guards import GuardedAttention, GuardedOps, KernelBuildError, guarded_attention
from enginecore.device.accelerator.memory import PooledMemory, gpu_memory
from enginecore.device.accelerator.runtime import Runtime, TorchRuntime
from enginecore.device.accelerator.transfer import BlockMover, Transfer

__all__ = [
    "AcceleratorBackend",
    "BlockMover",
    "GraphCaptureError",
    "GuardedAttention",
    "GuardedOps",
    "KernelBuildError",
    "PooledGraphs",
    "PooledMemory",
    "Runtime",
    "TorchRuntime",
    "Transfer",
    "collectives_of",
    "gpu_memory",
    "guarded_attention",
]
