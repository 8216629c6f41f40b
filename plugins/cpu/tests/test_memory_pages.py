"""The beginning of a cache is fetched beside what comes next, and its contents stay."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from enginecore.device import BackendContext, KVCacheSpec
from enginecore_cpu import native
from enginecore_cpu.backend import CpuBackend

pytestmark = pytest.mark.skipif(native.load() is None, reason="the kernels are not compiled here")
SPEC = KVCacheSpec(num_layers=4, num_kv_heads=2, head_size=64, dtype="float32", block_size=16)


def test_writing_meanwhile_loses_nothing():
    backend = CpuBackend(BackendContext(device="cpu", num_threads=2))
    caches = backend.memory.allocate_kv(backend.attention.kv_cache_layout(SPEC), 500, 4)
    for number, cache in enumerate(caches):
        cache.fill_(number + 1)
    thread = backend.memory._populating
    assert thread is not None
    thread.join()
    assert [float(cache.min()) for cache in caches] == [1, 2, 3, 4] == [float(cache.max()) for cache in caches]
    backend.memory.release_kv(caches)
    with pytest.raises(ValueError, match="within the tensor"):
        native.load().Kernels(1, "").populate(torch.zeros(4), 17)


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
