"""L2: the allocator and its books."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from enginecore.device import KVCacheLayout, MemoryInfo
from enginecore.testing.case import Case, CaseContext, FalseClaim
from enginecore.testing.cases.paged import Paged, Setting
from enginecore.testing.neighbour import Neighbour
from enginecore.testing.support import baseline_query

MIB = 2**20
#: What the books may be off by: allocator granularity, a C library that keeps arenas, pages of code touched meanwhile.
SLACK = 24 * MIB


def layout_of(ctx: CaseContext) -> KVCacheLayout:
    return ctx.attention.kv_cache_layout(Setting.from_query(baseline_query(ctx.backend.capabilities)).spec())


def info_consistent(ctx: CaseContext) -> None:
    info = ctx.memory.memory_info()
    ctx.check(isinstance(info, MemoryInfo), f"memory_info() must return a MemoryInfo, got {info!r}")
    ctx.check(0 < info.usable_bytes <= info.total_bytes, f"0 < usable <= total does not hold: {info}")
    ctx.check(0 <= info.free_bytes <= info.total_bytes, f"0 <= free <= total does not hold: {info}")
    ctx.check(isinstance(info.source, str) and info.source, "source must say where the limit comes from")
    for name in ("process_used_bytes", "peak_bytes"):
        value = getattr(ctx.memory, name)()
        ctx.check(isinstance(value, int) and value >= 0, f"{name}() must be a number of bytes, got {value!r}")
    ctx.check(ctx.memory.process_used_bytes() <= info.total_bytes, "this process uses more than the device has")


def _require_accounting(ctx: CaseContext) -> None:
    if not ctx.backend.capabilities.per_process_accounting:
        ctx.unsupported("per_process_accounting is not claimed")


def _cache_of(ctx: CaseContext, size: int) -> tuple[list[torch.Tensor], int]:
    """A cache of about `size` bytes in two tensors, every page touched, and its true size."""
    layout = layout_of(ctx)
    blocks = max(1, size // (2 * layout.page_bytes))
    caches = ctx.memory.allocate_kv(layout, blocks, 2)
    for cache in caches:
        cache.zero_()
    ctx.backend.synchronize()
    return caches, 2 * blocks * layout.page_bytes


def allocation_is_counted(ctx: CaseContext) -> None:
    _require_accounting(ctx)
    _cache_of(ctx, MIB)  # whatever the first use of an allocator costs is paid before the books are read
    before = ctx.memory.process_used_bytes()
    caches, size = _cache_of(ctx, 192 * MIB)
    grown = ctx.memory.process_used_bytes() - before
    if abs(grown - size) > SLACK:
        raise FalseClaim(f"per_process_accounting is claimed; {size} bytes were allocated, the books grew by {grown}")
    ctx.memory.release_kv(caches)
    del caches
    ctx.memory.empty_cache()
    left = ctx.memory.process_used_bytes() - before
    ctx.check(left <= SLACK, f"{left} bytes are still held after release_kv and empty_cache")


def peak_is_counted(ctx: CaseContext) -> None:
    _require_accounting(ctx)
    ctx.memory.reset_peak()
    start = ctx.memory.peak_bytes()
    used = ctx.memory.process_used_bytes()
    ctx.check(start >= used - SLACK, f"the peak {start} is below what is in use, {used}")
    caches, size = _cache_of(ctx, 128 * MIB)
    ctx.memory.release_kv(caches)
    del caches
    ctx.memory.empty_cache()
    peak = ctx.memory.peak_bytes()
    ctx.check(peak >= start + size - SLACK, f"{size} bytes came and went; the peak moved from {start} to {peak}")
    ctx.memory.reset_peak()
    after = ctx.memory.peak_bytes()
    if after > peak - size + SLACK:
        raise AssertionError(f"reset_peak() left the peak at {after}, though {size} bytes have been released")


def fuzz_allocations(ctx: CaseContext) -> None:
    """Random allocate, write and release: caches never overlap and keep what was written to them."""
    layout = layout_of(ctx)
    held: list[tuple[list[torch.Tensor], int]] = []
    for step in range(60):
        if held and (len(held) > 6 or ctx.integer(0, 2) == 0):
            caches, mark = held.pop(ctx.integer(0, len(held) - 1))
            _check_mark(ctx, caches, mark)
            ctx.memory.release_kv(caches)
            continue
        blocks, layers = ctx.integer(1, 40), ctx.integer(1, 4)
        caches = ctx.memory.allocate_kv(layout, blocks, layers)
        ctx.check(len(caches) == layers, f"{layers} tensors were asked for, {len(caches)} came")
        for layer, cache in enumerate(caches):
            ctx.check(tuple(cache.shape) == layout.shape_for(blocks), f"shape {tuple(cache.shape)} for {blocks} blocks")
            cache.fill_(step % 50 + layer + 1)
        held.append((list(caches), step % 50 + 1))
    for caches, mark in held:
        _check_mark(ctx, caches, mark)
        ctx.memory.release_kv(caches)


def _check_mark(ctx: CaseContext, caches: list[torch.Tensor], mark: int) -> None:
    ctx.backend.synchronize()
    for layer, cache in enumerate(caches):
        same = bool((cache.to(torch.float32) == mark + layer).all())
        ctx.check(same, "a cache lost its content while others were allocated and released: they overlap")


def no_leak(ctx: CaseContext) -> None:
    """Sixty times the same cache: the books end where they began."""
    _require_accounting(ctx)
    for round_ in range(61):
        caches, _ = _cache_of(ctx, 8 * MIB)
        ctx.memory.release_kv(caches)
        if round_ == 0:
            ctx.memory.empty_cache()
            before = ctx.memory.process_used_bytes()
    ctx.memory.empty_cache()
    leaked = ctx.memory.process_used_bytes() - before
    ctx.check(leaked <= SLACK, f"{leaked} bytes more are held after 60 caches of 8 MiB came and went")


def two_processes(ctx: CaseContext) -> None:
    """Another process fills its share: the books and the limits of this one, and so its budget, do not move."""
    claimed = ctx.backend.capabilities.per_process_accounting
    held, _ = _cache_of(ctx, 64 * MIB)
    usable, used = ctx.memory.memory_info().usable_bytes, ctx.memory.process_used_bytes()
    with Neighbour(ctx.options["source"], 160 * MIB) as neighbour:
        while_there = ctx.memory.memory_info().usable_bytes, ctx.memory.process_used_bytes()
        told = f"while another process holds {neighbour.size} bytes, "
        same = abs(while_there[0] - usable) <= SLACK and abs(neighbour.usable - usable) <= SLACK
        ctx.check(same, told + f"usable_bytes is {while_there[0]} here and {neighbour.usable} there; it was {usable}")
        if claimed:
            if abs(while_there[1] - used) > SLACK:
                raise FalseClaim(told + f"the books here moved from {used} to {while_there[1]}: they are not its own")
            if abs(neighbour.grown - neighbour.size) > SLACK:
                raise FalseClaim(told + f"its own books grew by {neighbour.grown}")
    ctx.memory.release_kv(held)


def impossible_allocation(ctx: CaseContext) -> None:
    """A cache of many times the device's memory is an exception, not a crash, and leaves the books as they were."""
    layout = layout_of(ctx)
    blocks = 64 * ctx.memory.memory_info().total_bytes // layout.page_bytes
    try:
        caches = ctx.memory.allocate_kv(layout, int(blocks), 1)
    except Exception:
        small = ctx.memory.allocate_kv(layout, 2, 1)
        ctx.memory.release_kv(small)
        return
    ctx.memory.release_kv(caches)
    raise AssertionError("a cache of 64 times the device's memory was granted")


def shrink_keeps_content(ctx: CaseContext) -> None:
    paged = Paged(ctx, Setting(), num_blocks=32)
    paged.free = [block for block in paged.free if block < 12]
    seqs = [paged.sequence(1, 2 * paged.block_size + 1), paged.sequence(3, paged.block_size)]
    paged.fill(seqs)
    paged.caches = ctx.memory.shrink_kv(paged.caches, 12)
    shape = tuple(paged.caches[0].shape)
    ctx.check(shape == paged.layout.shape_for(12), f"a cache shrunk to 12 blocks has shape {shape}")
    paged.num_blocks = 12
    paged.verify(seqs, "in a cache that was shrunk")


def pinned_host(ctx: CaseContext) -> None:
    tensor = ctx.memory.host_alloc_pinned((3, 5), torch.float32)
    ctx.check(tuple(tensor.shape) == (3, 5) and tensor.dtype == torch.float32, f"got {tensor.shape} {tensor.dtype}")
    ctx.check(tensor.device.type == "cpu", f"host memory on {tensor.device}")
    if ctx.backend.capabilities.pinned_host and not tensor.is_pinned():
        raise FalseClaim("pinned_host is claimed and host_alloc_pinned returns memory that is not pinned")


def arrays_travel_beside_the_work(ctx: CaseContext) -> None:
    """Arrays are sent and results fetched while earlier work is under way, each result asked for one step late: nothing
    may be read or written over too soon."""
    if not ctx.backend.capabilities.asynchronous:
        ctx.unsupported("asynchronous is not claimed")
    from enginecore.runner.transfers import NUM_STAGES, StagedTransfers

    device = ctx.backend.torch_device()
    transfers, busy = StagedTransfers(ctx.backend), torch.ones(512, 512, device=device)
    waiting: list[tuple[int, Callable[[], list[torch.Tensor]]]] = []
    for step in range(4 * NUM_STAGES):
        sent_N, offset = transfers.send(np.arange(1000 + step), np.array([step]))
        for _ in range(4):
            busy = busy @ busy / 512
        waiting.append((step, transfers.fetch(sent_N * 3 + offset, busy[0, :1])))
        if len(waiting) > 1:
            _check_arrival(ctx, *waiting.pop(0))
    _check_arrival(ctx, *waiting.pop())


def _check_arrival(ctx: CaseContext, step: int, fetched: Callable[[], list[torch.Tensor]]) -> None:
    result_N, busy = fetched()
    right = bool((result_N.numpy() == np.arange(1000 + step) * 3 + step).all()) and float(busy[0]) == 1.0
    ctx.check(right, f"what step {step} computed is not what has arrived: asynchronous is claimed")


def cases() -> list[Case]:
    checks = (
        info_consistent, allocation_is_counted, peak_is_counted, fuzz_allocations, no_leak, two_processes,
        impossible_allocation, shrink_keeps_content, pinned_host, arrays_travel_beside_the_work,
    )  # fmt: skip
    return [Case(2, "memory", check.__name__, check) for check in checks]
