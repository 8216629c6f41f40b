"""The backend around the simulated model: modelled memory, and host tensors where the contract asks for tensors."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

from enginecore.device import (
    Backend,
    BackendContext,
    Capabilities,
    KVCacheLayout,
    MemoryInfo,
    MemoryManager,
)
from enginecore.errors import DriverMissingError

from enginecore_sim.options import SimOptions
from enginecore_sim.runtime import SimRuntime

if TYPE_CHECKING:
    import torch


class SimMemory(MemoryManager):
    """Books of the modelled device: the runtime's cache and whatever `allocate_kv` gave out."""

    def __init__(self, options: SimOptions, runtime: SimRuntime) -> None:
        self._total = options.total_memory
        self._runtime = runtime
        self._given: dict[int, int] = {}
        self._peak = 0

    def memory_info(self) -> MemoryInfo:
        free = max(0, self._total - self.process_used_bytes())
        return MemoryInfo(total_bytes=self._total, usable_bytes=self._total, free_bytes=free, source="modelled")

    def process_used_bytes(self) -> int:
        used = self._runtime.memory_bytes() + sum(self._given.values())
        self._peak = max(self._peak, used)
        return used

    def peak_bytes(self) -> int:
        self.process_used_bytes()
        return self._peak

    def reset_peak(self) -> None:
        self._peak = 0

    def empty_cache(self) -> None:
        pass

    def allocate_kv(self, layout: KVCacheLayout, num_blocks: int, num_layers: int) -> list[torch.Tensor]:
        import torch

        shape, dtype = layout.shape_for(num_blocks), getattr(torch, layout.dtype)
        caches = [torch.empty(shape, dtype=dtype) for _ in range(num_layers)]
        self._given.update({id(cache): cache.nbytes for cache in caches})
        return caches

    def release_kv(self, caches: list[torch.Tensor]) -> None:
        for cache in caches:
            self._given.pop(id(cache), None)


class SimEvent:
    """All simulated work is done when it is given."""

    def record(self) -> None:
        pass

    def synchronize(self) -> None:
        pass

    def query(self) -> bool:
        return True


class SimBackend(Backend):
    def __init__(self, ctx: BackendContext) -> None:
        options = SimOptions.of(ctx.options)
        self.set_device(ctx.index)
        dtypes = frozenset({"float32", "bfloat16", "float16"} if options.device is None else options.device.flops)
        self.capabilities = Capabilities(
            dtypes=dtypes,
            kv_dtypes=dtypes,
            block_sizes=frozenset(range(8, 129)),
            head_size_range=(1, 1024, 1),
            max_gqa_ratio=1024,
            per_process_accounting=True,
            batch_invariant=True,
        )
        self.runtime = SimRuntime(options)
        self.memory = SimMemory(options, self.runtime)
        self.attention = None
        self.ops = None

    def torch_device(self) -> torch.device:
        import torch

        return torch.device("cpu")

    def set_device(self, index: int) -> None:
        if index != 0:
            raise DriverMissingError(f"the simulated device has index 0 only, got {index}", fix="use --device sim")

    def synchronize(self) -> None:
        pass

    def stream(self) -> Any:
        return contextlib.nullcontext()

    def event(self) -> Any:
        return SimEvent()

    def manual_seed(self, seed: int) -> None:
        pass

    def shutdown(self) -> None:
        pass
