"""The beginning of a cache is fetched while the engine starts, more of it when blocks are written to; contents stay."""

from __future__ import annotations

import ctypes
import mmap
import subprocess
import sys
import time

import pytest
import torch
from enginecore.device import BackendContext, KVCacheSpec
from enginecore_cpu import native, pages
from enginecore_cpu.backend import CpuBackend

pytestmark = pytest.mark.skipif(native.load() is None, reason="the kernels are not compiled here")
SPEC = KVCacheSpec(num_layers=4, num_kv_heads=2, head_size=64, dtype="float32", block_size=16)


def test_writing_meanwhile_loses_nothing():
    backend = CpuBackend(BackendContext(device="cpu", num_threads=2))
    caches = backend.memory.allocate_kv(backend.attention.kv_cache_layout(SPEC), 500, 4)
    for number, cache in enumerate(caches):
        cache.fill_(number + 1)
    backend.synchronize()
    assert [float(cache.min()) for cache in caches] == [1, 2, 3, 4] == [float(cache.max()) for cache in caches]
    backend.memory.release_kv(caches)
    with pytest.raises(ValueError, match="within the tensor"):
        native.load().Kernels(1, "").populate(torch.zeros(4), 17)


def resident(cache: torch.Tensor) -> int:
    """Bytes of a tensor that are in memory."""
    page = mmap.PAGESIZE
    begin, end = cache.data_ptr() // page * page, cache.data_ptr() + cache.nbytes
    there = (ctypes.c_ubyte * -(-(end - begin) // page))()
    assert ctypes.CDLL(None).mincore(ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), there) == 0
    return sum(byte & 1 for byte in there) * page


@pytest.mark.skipif(sys.platform != "linux", reason="asks Linux what is in memory")
def test_more_pages_come_as_blocks_are_written_to(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(pages, "_FIRST", 16 << 20)
    backend = CpuBackend(BackendContext(device="cpu", num_threads=2))
    layout, memory = backend.attention.kv_cache_layout(SPEC), backend.memory
    blocks = (48 << 20) // layout.page_bytes  # larger than anything that is freed and used again: untouched pages
    caches = memory.allocate_kv(layout, blocks, 4)
    backend.synchronize()
    assert all(4 << 20 <= resident(cache) <= 8 << 20 for cache in caches)
    first = (4 << 20) // layout.page_bytes  # of each layer
    key = torch.ones(1, 2, 64)

    def fetched(least: int, block: int) -> bool:
        for _ in range(500):
            backend.attention.reshape_and_cache(key, key, caches[0], torch.tensor([block * 16]))
            if min(resident(cache) for cache in caches) >= least:
                return True
            time.sleep(0.01)
        return False

    backend.attention.reshape_and_cache(key, key, caches[0], torch.tensor([first // 4 * 16]))
    time.sleep(0.3)
    assert resident(caches[1]) <= 8 << 20, "nobody is near the end of what is there"
    assert fetched(6 << 20, first - 1)
    assert fetched(16 << 20, 4 * first - 1)
    memory.release_kv(caches)


def test_a_process_that_ends_at_once_ends_well():
    script = (
        "from enginecore.device import BackendContext, KVCacheSpec\n"
        "from enginecore_cpu.backend import CpuBackend\n"
        "backend = CpuBackend(BackendContext(device='cpu', num_threads=1))\n"
        "spec = KVCacheSpec(num_layers=30, num_kv_heads=3, head_size=64, dtype='bfloat16', block_size=16)\n"
        "backend.memory.allocate_kv(backend.attention.kv_cache_layout(spec), 20000, 30)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")
