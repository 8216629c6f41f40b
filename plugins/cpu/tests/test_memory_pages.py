"""The beginning of a cache is fetched while the engine starts, more of it when blocks are written to; contents stay."""

from __future__ import annotations

import ctypes
import mmap
import subprocess
import sys
import time
from collections import Counter
from typing import Any

import pytest
import torch
from enginecore.device import BackendContext, KVCacheSpec
from enginecore_cpu import native, pages
from enginecore_cpu.attention import NativeAttention, native_capabilities
from enginecore_cpu.backend import CpuBackend
from enginecore_cpu.memory import CpuMemory
from enginecore_cpu.pages import PagesAhead

pytestmark = pytest.mark.skipif(native.load() is None, reason="the kernels are not compiled here")
on_linux = pytest.mark.skipif(sys.platform != "linux", reason="pages are fetched ahead on Linux only")
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


@on_linux
def test_fetched_pages_are_there():
    cache = torch.empty(48 << 20, dtype=torch.uint8)
    assert native.load().Kernels(1, "").populate(cache, 20 << 20)
    assert resident(cache[: 20 << 20]) >= 20 << 20


class Fetched:
    """Kernels that remember how much of each cache was fetched. The system isn't asked: it may hand out memory that
    this process has touched before."""

    def __init__(self, kernels: Any) -> None:
        self._kernels, self.bytes = kernels, Counter[int]()
        self.wait_for_block = kernels.wait_for_block

    def populate(self, cache: torch.Tensor, size: int) -> bool:
        done = self._kernels.populate(cache, size)
        self.bytes[cache.data_ptr()] = size
        return done


@on_linux
def test_more_pages_come_as_blocks_are_written_to(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(pages, "_FIRST", 16 << 20)
    kernels = native.load().Kernels(2, "")
    attention, fetched = NativeAttention(kernels, native_capabilities(kernels.isa)), Fetched(kernels)
    memory = CpuMemory(pages=PagesAhead(fetched))
    layout = attention.kv_cache_layout(SPEC)
    block = layout.page_bytes
    caches = memory.allocate_kv(layout, (16 << 20) // block, 4)
    memory.pages.wait()
    assert list(fetched.bytes.values()) == [4 << 20] * 4
    key = torch.ones(1, 2, 64)

    def write(number: int) -> None:
        attention.reshape_and_cache(key, key, caches[0], torch.tensor([number * 16]))

    def comes(size: int, number: int) -> bool:
        for _ in range(500):
            write(number)
            if min(fetched.bytes.values()) >= size:
                return True
            time.sleep(0.01)
        return False

    write((1 << 20) // block)
    time.sleep(0.3)
    assert max(fetched.bytes.values()) == 4 << 20, "nobody is near the end of what is there"
    assert comes(6 << 20, (4 << 20) // block - 1)
    assert comes(16 << 20, (16 << 20) // block - 1)
    assert set(fetched.bytes.values()) == {16 << 20}
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
