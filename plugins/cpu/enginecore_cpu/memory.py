"""Main memory as the engine's device memory."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable

import torch
from enginecore.device.memory import KVCacheLayout, MemoryInfo, MemoryManager

from enginecore_cpu import system
from enginecore_cpu.pages import PagesAhead


def _status_bytes(key: str) -> int | None:
    """A "kB" line of /proc/self/status, in bytes."""
    try:
        with open("/proc/self/status") as lines:
            for line in lines:
                if line.startswith(key + ":"):
                    return int(line.split()[1]) * 1024
    except OSError:
        pass
    return None


class CpuMemory(MemoryManager):
    """Resident memory of this process. Pages of the cache are touched when a token is written to them, or with `pages`
    a little before.

    `advise_huge`, where given, asks the system for huge pages under a tensor that nothing has touched yet.
    """

    def __init__(
        self, advise_huge: Callable[[torch.Tensor], None] | None = None, pages: PagesAhead | None = None
    ) -> None:
        self._advise_huge, self.pages = advise_huge, pages

    def memory_info(self) -> MemoryInfo:
        limit = system.memory_limit()
        return MemoryInfo(total_bytes=limit.total, usable_bytes=limit.bytes, free_bytes=limit.free, source=limit.source)

    def process_used_bytes(self) -> int:
        used = _status_bytes("VmRSS")
        return used if used is not None else self.peak_bytes()

    def peak_bytes(self) -> int:
        peak = _status_bytes("VmHWM")
        if peak is not None:
            return peak
        if sys.platform == "win32":
            return 0
        import resource

        unit = 1 if sys.platform == "darwin" else 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit

    def reset_peak(self) -> None:
        # "5" resets the high-water mark of the resident set (Linux 4.0 and later); elsewhere the peak is for life.
        with contextlib.suppress(OSError), open("/proc/self/clear_refs", "w") as file:
            file.write("5")

    def empty_cache(self) -> None:
        """The C library gives freed pages back by itself, except what lies at the end of its arenas."""
        if sys.platform == "linux":
            import ctypes

            trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
            if trim is not None:
                trim(0)

    def allocate_kv(self, layout: KVCacheLayout, num_blocks: int, num_layers: int) -> list[torch.Tensor]:
        if num_blocks < 1 or num_layers < 1:
            raise ValueError(f"allocate_kv needs at least one block and one layer, got {num_blocks} and {num_layers}")
        dtype = getattr(torch, layout.dtype)
        caches = [torch.empty(layout.shape_for(num_blocks), dtype=dtype) for _ in range(num_layers)]
        if self._advise_huge is not None:
            for cache in caches:
                self._advise_huge(cache)
        if self.pages is not None:
            self.pages.start(caches, num_blocks)
        return caches

    def release_kv(self, caches: list[torch.Tensor]) -> None:
        if self.pages is not None:
            self.pages.stop()
        # The caller may hold other references to the list's tensors; dropping the storage frees the pages now.
        for cache in caches:
            cache.untyped_storage().resize_(0)
        caches.clear()

    def host_alloc_pinned(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype)
