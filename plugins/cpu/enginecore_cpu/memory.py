"""Main memory as the engine's device memory."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable

import torch
from enginecore.device.memory import KVCacheLayout, MemoryInfo, MemoryManager

from enginecore_cpu import system


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


#: Bytes of a new cache whose pages are fetched beside whatever comes next. Blocks are taken from the lowest up, and a
#: page's first touch costs more than all that a step writes to it.
_POPULATED = 256 << 20


class CpuMemory(MemoryManager):
    """Resident memory of this process; but for its beginning the cache's pages are touched only when a token is written
    to them.

    `advise_huge`, where given, asks the system for huge pages under a tensor that nothing has touched yet; `populate`
    fetches the pages of a tensor's first bytes and changes nothing.
    """

    def __init__(
        self,
        advise_huge: Callable[[torch.Tensor], None] | None = None,
        populate: Callable[[torch.Tensor, int], bool] | None = None,
    ) -> None:
        self._advise_huge, self._populate = advise_huge, populate
        self._populating: threading.Thread | None = None
        self._stopped = threading.Event()

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
        if self._populate is not None:
            self._stopped.clear()
            share = min(caches[0].nbytes, _POPULATED // num_layers)
            self._populating = threading.Thread(target=self._fetch, args=(list(caches), share))
            self._populating.start()
        return caches

    def _fetch(self, caches: list[torch.Tensor], share: int) -> None:
        """A little of each cache, then more of each: what is needed first is there first. Ends with the process, which
        waits for this thread: one that is killed inside native code takes the process down."""
        assert self._populate is not None
        steps, main = 8, threading.main_thread()
        for step in range(1, steps + 1):
            for cache in caches:
                if self._stopped.is_set() or not main.is_alive():
                    return
                if not self._populate(cache, max(1, share * step // steps)):
                    return

    def release_kv(self, caches: list[torch.Tensor]) -> None:
        if self._populating is not None:
            self._stopped.set()
            self._populating.join()
            self._populating = None
        # The caller may hold other references to the list's tensors; dropping the storage frees the pages now.
        for cache in caches:
            cache.untyped_storage().resize_(0)
        caches.clear()

    def host_alloc_pinned(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype)
