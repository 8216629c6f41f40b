"""A memory manager over torch's caching allocator: the KV cache is one pool taken once, the books are this process's.

    budget = f x usable          usable: the device, or the partition of it that this process sees
    |-- process base --|-- weights --|-- activations --|-- graphs --|------- KV pool -------|

Other processes never enter the budget; whether so much is really free is asked when it is taken.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from enginecore.device.accelerator.runtime import Runtime
from enginecore.device.limits import memory_limit
from enginecore.device.memory import KVCacheLayout, MemoryInfo, MemoryManager
from enginecore.errors import OutOfDeviceMemory

if TYPE_CHECKING:
    import torch

#: Start of each cache in the pool: what kernels with wide loads want, and torch's allocator gives.
ALIGNMENT = 512


def _no_limit() -> None:
    return None


@dataclass
class _Pool:
    """`held` tensors of the pool are not released yet."""

    layout: KVCacheLayout
    held: int


class PooledMemory(MemoryManager):
    """`outside` says how many bytes of the device this process holds beside torch's allocator (the driver's context,
    libraries' own buffers); `limit` how many it may use at most, None for no limit but the device; `source` where the
    total comes from; `signs` are words of errors that mean exhausted memory, beyond those torch uses."""

    def __init__(
        self,
        runtime: Runtime,
        *,
        source: str = "device memory",
        outside: Callable[[], int] = lambda: 0,
        limit: Callable[[], int | None] = _no_limit,
        signs: tuple[str, ...] = (),
    ) -> None:
        self._runtime, self._source, self._outside, self._limit = runtime, source, outside, limit
        self._signs = tuple(sign.lower() for sign in signs)
        self._pools: dict[int, _Pool] = {}

    # ---- books -----------------------------------------------------------------------------------------------------

    def memory_info(self) -> MemoryInfo:
        free, total = self._runtime.memory_info()
        limit = self._limit()
        usable = total if limit is None else min(total, limit)
        source = self._source if usable == total else f"{self._source}, limited to {usable} bytes"
        return MemoryInfo(total_bytes=total, usable_bytes=usable, free_bytes=min(free, total), source=source)

    def process_used_bytes(self) -> int:
        return self._runtime.reserved_bytes() + self._outside()

    def peak_bytes(self) -> int:
        return self._runtime.peak_bytes() + self._outside()

    def reset_peak(self) -> None:
        self._runtime.reset_peak()

    def empty_cache(self) -> None:
        self._runtime.synchronize()
        self._runtime.empty_cache()

    def out_of_memory(self, error: BaseException) -> bool:
        text = str(error).lower()
        return super().out_of_memory(error) or (
            isinstance(error, RuntimeError) and any(sign in text for sign in self._signs)
        )

    # ---- the KV pool -------------------------------------------------------------------------------------------------

    def allocate_kv(self, layout: KVCacheLayout, num_blocks: int, num_layers: int) -> list[torch.Tensor]:
        """Views of one allocation, layer after layer. Raises OutOfDeviceMemory with the figures."""
        import torch

        if num_blocks < 1 or num_layers < 1:
            raise ValueError(f"allocate_kv needs at least one block and one layer, got {num_blocks} and {num_layers}")
        dtype, shape = getattr(torch, layout.dtype), layout.shape_for(num_blocks)
        size = math.prod(shape) * dtype.itemsize
        stride = -(-size // ALIGNMENT) * ALIGNMENT
        pool = self._take(stride * num_layers, f"a KV cache of {num_blocks} blocks in {num_layers} layers")
        self._pools[_key(pool)] = _Pool(layout, num_layers)
        return [pool[i * stride : i * stride + size].view(dtype).view(shape) for i in range(num_layers)]

    def release_kv(self, caches: list[torch.Tensor]) -> None:
        """The memory goes back to the allocator with the last cache of its pool, whoever else holds the tensors."""
        for cache in caches:
            key = _key(cache)
            pool = self._pools.get(key)
            if pool is None:  # not from here: its memory goes with its last holder
                continue
            pool.held -= 1
            if not pool.held:
                del self._pools[key]
                self._runtime.resize(cache, 0)
        caches.clear()

    def shrink_kv(self, caches: list[torch.Tensor], num_blocks: int) -> list[torch.Tensor]:
        """Into a pool of its own; by way of the host where both do not fit beside each other."""
        layout, layers = self._pools[_key(caches[0])].layout, len(caches)
        axis = layout.shape.index(-1)
        kept = [cache.narrow(axis, 0, num_blocks) for cache in caches]
        try:
            fresh = self.allocate_kv(layout, num_blocks, layers)
        except OutOfDeviceMemory:
            kept = [part.to("cpu", copy=True) for part in kept]
            self.release_kv(caches)
            self.empty_cache()
            fresh = self.allocate_kv(layout, num_blocks, layers)
        for target, source in zip(fresh, kept, strict=True):
            target.copy_(source)
        if caches:
            self._runtime.synchronize()
            self.release_kv(caches)
        return fresh

    def _take(self, num_bytes: int, what: str) -> torch.Tensor:
        try:
            try:
                return self._runtime.allocate(num_bytes)
            except Exception as error:
                if not self.out_of_memory(error):
                    raise
            self.empty_cache()  # cached memory in pieces may be in the way
            return self._runtime.allocate(num_bytes)
        except Exception as error:
            if not self.out_of_memory(error):
                raise
            info = self.memory_info()
            raise OutOfDeviceMemory(
                f"{what} needs {num_bytes} bytes and {info.free_bytes} of {info.total_bytes} are free; this process "
                f"holds {self.process_used_bytes()}",
                fix="stop what else uses the device, or lower memory_utilization, kv_cache_memory or num_blocks",
            ) from error

    # ---- host memory, sleep ------------------------------------------------------------------------------------------

    def host_alloc_pinned(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return self._runtime.allocate_pinned(math.prod(shape) * dtype.itemsize).view(dtype).view(shape)

    def sleep(self, state: dict[str, Any]) -> None:
        self._runtime.synchronize()
        asleep = state.setdefault("asleep", [])
        for tensor in _by_storage(state.get("weights", ())):
            flat = _bytes_of(tensor)
            host = self._runtime.allocate_pinned(len(flat))
            host.copy_(flat)
            asleep.append((tensor, len(flat), host))
            self._runtime.resize(tensor, 0)
        for tensor in _by_storage(state.get("kv_caches", ())):
            asleep.append((tensor, tensor.untyped_storage().nbytes(), None))
            self._runtime.resize(tensor, 0)
        self.empty_cache()

    def wake(self, state: dict[str, Any]) -> None:
        asleep = state.get("asleep", [])
        while asleep:
            tensor, num_bytes, host = asleep[0]
            try:
                self._runtime.resize(tensor, num_bytes)
            except Exception as error:
                if not self.out_of_memory(error):
                    raise
                raise OutOfDeviceMemory(
                    f"waking needs {num_bytes} bytes more and {self.memory_info().free_bytes} are free",
                    fix="stop what has taken the device's memory meanwhile, then wake again",
                ) from error
            if host is not None:
                _bytes_of(tensor).copy_(host)
            asleep.pop(0)
        self._runtime.synchronize()


def _key(tensor: torch.Tensor) -> int:
    """What stays the same for all views of an allocation, also while its memory is given back."""
    key: int = tensor.untyped_storage()._cdata
    return key


def _by_storage(tensors: Any) -> list[torch.Tensor]:
    """One tensor for each allocation."""
    return list({_key(tensor): tensor for tensor in tensors}.values())


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    import torch

    flat: torch.Tensor = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())
    return flat


def gpu_memory(
    runtime: Runtime,
    *,
    source: str,
    integrated: bool,
    driver_bytes: Callable[[], int | None],
    context_bytes: int,
    signs: tuple[str, ...],
) -> PooledMemory:
    """The memory of a GPU: its own, or the host's within the container's limit where it is `integrated`.

    `driver_bytes` is what the driver counts for this process; where it does not know (None), what lies beside torch's
    allocator is taken to be `context_bytes`.
    """

    def outside() -> int:
        held = driver_bytes()
        return context_bytes if held is None else max(0, held - runtime.reserved_bytes())

    if not integrated:
        return PooledMemory(runtime, source=source, outside=outside, signs=signs)
    shared = "memory shared with the host"
    return PooledMemory(runtime, source=shared, outside=outside, limit=_container_limit, signs=signs)


def _container_limit() -> int | None:
    limit = memory_limit()
    return None if limit is None else int(limit.value)
