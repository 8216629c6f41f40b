"""The budget and the pool on a device that exists only as books: what is taken, given back, and refused."""

from __future__ import annotations

import pytest
import torch
from enginecore.device import KVCacheLayout
from enginecore.device.accelerator import PooledMemory
from enginecore.errors import OutOfDeviceMemory
from enginecore.testing.fake_runtime import FakeRuntime

LAYOUT = KVCacheLayout(shape=(-1, 2, 16, 2, 8), dtype="float16", page_bytes=2 * 16 * 2 * 8 * 2)
MIB = 2**20


def test_the_cache_is_one_allocation_and_goes_back_with_its_last_tensor() -> None:
    runtime = FakeRuntime()
    memory = PooledMemory(runtime, outside=lambda: 7)
    assert memory.process_used_bytes() == 7
    caches = memory.allocate_kv(LAYOUT, 5, 3)
    assert [kind for kind, _ in runtime.events] == ["allocate"]
    assert [tuple(cache.shape) for cache in caches] == [(5, 2, 16, 2, 8)] * 3
    assert memory.process_used_bytes() == 7 + 3 * 5 * LAYOUT.page_bytes  # a multiple of the alignment here
    for mark, cache in enumerate(caches):
        cache.fill_(mark)
    assert [float(cache.sum()) for cache in caches] == [mark * caches[0].numel() for mark in range(3)]
    first = caches.pop(0)
    memory.release_kv(caches)
    assert float(first.sum()) == 0 and runtime.reserved > 0
    memory.release_kv([first])
    memory.empty_cache()
    assert memory.process_used_bytes() == 7 and memory.peak_bytes() > 7


def test_other_processes_never_enter_the_budget_and_are_met_when_memory_is_taken() -> None:
    alone, crowded = FakeRuntime(64 * MIB), FakeRuntime(64 * MIB, others=60 * MIB)
    budgets = [PooledMemory(runtime).memory_info().usable_bytes for runtime in (alone, crowded)]
    assert budgets == [64 * MIB, 64 * MIB]
    memory = PooledMemory(crowded)
    with pytest.raises(OutOfDeviceMemory, match=rf"{4 * MIB} of {64 * MIB} are free") as error:
        memory.allocate_kv(LAYOUT, 8 * MIB // LAYOUT.page_bytes, 1)
    assert "lower memory_utilization" in str(error.value) and memory.process_used_bytes() == 0


def test_a_limit_below_the_device_is_the_budget() -> None:
    info = PooledMemory(FakeRuntime(64 * MIB), source="shared memory", limit=lambda: 10 * MIB).memory_info()
    assert info.usable_bytes == 10 * MIB and "limited" in info.source


def test_cached_pieces_are_given_up_before_an_allocation_is_refused() -> None:
    runtime = FakeRuntime(8 * MIB)
    memory = PooledMemory(runtime)
    runtime.cached, runtime.others = 2 * MIB, 0
    real = runtime.allocate

    def in_pieces(num_bytes: int) -> torch.Tensor:
        if runtime.cached:
            raise torch.OutOfMemoryError("Tried to allocate; the cached memory lies in pieces")
        return real(num_bytes)

    runtime.allocate = in_pieces  # type: ignore[method-assign]
    assert len(memory.allocate_kv(LAYOUT, 2, 1)) == 1
    assert ("empty_cache", 2 * MIB) in runtime.events


@pytest.mark.parametrize("room_for_both", [True, False])
def test_shrinking_keeps_the_first_blocks(room_for_both: bool) -> None:
    size = 2 * 16 * LAYOUT.page_bytes
    runtime = FakeRuntime(2 * size if room_for_both else size + 100)
    memory = PooledMemory(runtime)
    caches = memory.allocate_kv(LAYOUT, 16, 2)
    for layer, cache in enumerate(caches):
        cache.copy_(torch.arange(16).view(-1, 1, 1, 1, 1) + 100 * layer)
    fresh = memory.shrink_kv(caches, 6)
    assert not caches and [tuple(cache.shape) for cache in fresh] == [(6, 2, 16, 2, 8)] * 2
    assert [cache[:, 0, 0, 0, 0].tolist() for cache in fresh] == [[*range(6)], [*range(100, 106)]]
    memory.empty_cache()
    assert memory.process_used_bytes() == 2 * 6 * LAYOUT.page_bytes


def test_sleep_gives_everything_back_and_wake_restores_the_weights() -> None:
    runtime = FakeRuntime(8 * MIB)
    memory = PooledMemory(runtime)
    caches = memory.allocate_kv(LAYOUT, 4, 2)
    weight = runtime.allocate(4096).view(torch.float32)
    weight.copy_(torch.arange(1024.0))
    tied = weight[:512]
    state = {"kv_caches": caches, "weights": [weight, tied]}
    held = runtime.reserved_bytes()
    memory.sleep(state)
    assert held > 4096 and runtime.reserved_bytes() == 0
    runtime.others = 8 * MIB  # somebody else has taken the device meanwhile
    with pytest.raises(OutOfDeviceMemory, match="waking needs"):
        memory.wake(state)
    runtime.others = 0
    memory.wake(state)
    assert torch.equal(weight, torch.arange(1024.0)) and torch.equal(tied, weight[:512])
    caches[1].fill_(3)
    assert runtime.reserved_bytes() == held and float(caches[0].sum()) != float(caches[1].sum())


@pytest.mark.parametrize(
    ("error", "is_one"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"), True),
        (
            RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes"),
            True,
        ),
        (RuntimeError("CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate"), True),
        (OutOfDeviceMemory("full"), True),
        (RuntimeError("shapes do not match"), False),
        (ValueError("tried to allocate"), False),
    ],
)
def test_which_errors_mean_exhausted_memory(error: Exception, is_one: bool) -> None:
    memory = PooledMemory(FakeRuntime(), signs=("CUBLAS_STATUS_ALLOC_FAILED",))
    assert memory.out_of_memory(error) is is_one


def test_pinned_host_memory_has_the_shape_that_was_asked_for() -> None:
    tensor = PooledMemory(FakeRuntime()).host_alloc_pinned((3, 5), torch.int32)
    assert tuple(tensor.shape) == (3, 5) and tensor.dtype == torch.int32
