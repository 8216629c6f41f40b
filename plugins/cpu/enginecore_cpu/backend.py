"""The CPU backend: native kernels when they were compiled, plain torch otherwise."""

from __future__ import annotations

import contextlib
import os
from typing import Any

import torch
from enginecore.device.attention import AttentionBackend
from enginecore.device.backend import Backend
from enginecore.device.manifest import BackendContext
from enginecore.device.optable import OpTable
from enginecore.errors import DriverMissingError
from enginecore.ops.torch_backend import DoneEvent, ReferenceOps

from enginecore_cpu import native, system
from enginecore_cpu.attention import NativeAttention, native_capabilities
from enginecore_cpu.graphs import CpuGraphs
from enginecore_cpu.memory import CpuMemory
from enginecore_cpu.ops import NativeOps
from enginecore_cpu.pages import PagesAhead
from enginecore_cpu.torch_path import TorchAttention, torch_capabilities


class CpuBackend(Backend):
    """`options`, for tests and comparisons: "kernels" ("native" or "torch"), "isa" (a name that `doctor` shows),
    "torch_threads" (threads of torch's own operations beside the native kernels; 1)."""

    memory: CpuMemory
    attention: AttentionBackend
    ops: OpTable
    collective_backend = "gloo"

    def __init__(self, ctx: BackendContext) -> None:
        budget = system.cpu_budget(ctx.num_threads)
        self.num_threads = budget.threads
        #: Where this thread ran before it was bound to one NUMA node, None where it was not.
        self._unbound = _bind(budget.cpus)
        wanted = ctx.options.get("kernels")
        module = None if wanted == "torch" else native.load()
        if wanted == "native" and module is None:
            raise DriverMissingError("the CPU plugin was installed without compiled kernels")
        self.set_device(ctx.index)
        if module is None:
            torch.set_num_threads(self.num_threads)
            self.memory = CpuMemory()
            self.capabilities = torch_capabilities()
            self.attention = TorchAttention(self.capabilities)
            self.ops = ReferenceOps()
        else:
            # After a parallel region torch's OpenMP threads spin for some milliseconds, on the processors that the
            # kernels' own threads need next. What is left to torch here is small.
            torch.set_num_threads(ctx.options.get("torch_threads", 1))
            kernels = module.Kernels(self.num_threads, ctx.options.get("isa", ""))
            self.memory = CpuMemory(kernels.advise_huge, PagesAhead(kernels))
            self.capabilities = native_capabilities(kernels.isa)
            self.attention = NativeAttention(kernels, self.capabilities)
            self.ops = NativeOps(kernels)
            self.graphs = CpuGraphs(kernels)

    def torch_device(self) -> torch.device:
        return torch.device("cpu")

    def set_device(self, index: int) -> None:
        if index != 0:
            raise DriverMissingError(f"there is one CPU device, cpu:0; cpu:{index} does not exist")

    def synchronize(self) -> None:
        """Kernels have run when a call returns; what may still be on its way are the first pages of the cache."""
        if self.memory.pages is not None:
            self.memory.pages.wait()

    def stream(self) -> Any:
        return contextlib.nullcontext()

    def event(self) -> DoneEvent:
        return DoneEvent()

    def manual_seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    def shutdown(self) -> None:
        if self._unbound is not None:
            _bind(tuple(self._unbound))
            self._unbound = None


def _bind(cpus: tuple[int, ...]) -> set[int] | None:
    """Keep this thread, and those that it starts, to `cpus`: what they touch first then lies in memory near those.
    Returns where it ran before; None when nothing is changed."""
    if not cpus or not hasattr(os, "sched_setaffinity"):
        return None
    before = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, cpus)
    except OSError:  # not allowed here: the system places threads as it likes
        return None
    return before
