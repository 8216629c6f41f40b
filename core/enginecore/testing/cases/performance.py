"""L6: how fast, as a share of what this device was just measured to reach in a plain copy and a plain product.

Nothing fails for being slow, unless the plugin's profile promises a floor. Metrics: "share" (1 is the device's own copy
or product; caches can lift it above), and what was achieved, in gb_s or gflop_s.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from enginecore.testing.case import Case, CaseContext
from enginecore.testing.cases.paged import Paged, Setting
from enginecore.testing.support import DTYPES

MIB = 2**20
#: Seconds that one measurement should take at least, so that clocks and launches do not count.
LONG_ENOUGH = 4e-3
ROUNDS = 7


def seconds_of(ctx: CaseContext, work: Callable[[], Any]) -> float:
    """Seconds of one call of `work`: the best of some rounds, each long enough to be measured."""

    def spent(calls: int) -> float:
        ctx.backend.synchronize()
        started = time.perf_counter()
        for _ in range(calls):
            work()
        ctx.backend.synchronize()
        return time.perf_counter() - started

    calls = 1
    spent(1)
    while spent(calls) < LONG_ENOUGH and calls < 1 << 16:
        calls *= 2
    return min(spent(calls) for _ in range(ROUNDS)) / calls


def ceilings(ctx: CaseContext, dtype: str) -> dict[str, float]:
    """{"gb_s": copy bandwidth, reads and writes counted, "gflop_s": matrix rate in `dtype`}, measured once a run."""
    kept = Path(ctx.options["scratch"]) / f"ceilings-{dtype}.json"
    if not kept.exists():
        # What a plugin leaves to torch may run on fewer threads than the device has; the yardstick may not.
        threads = torch.get_num_threads()
        torch.set_num_threads(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else threads)
        try:
            kept.write_text(json.dumps({"gb_s": _copy_rate(ctx), "gflop_s": _matrix_rate(ctx, dtype)}))
        finally:
            torch.set_num_threads(threads)
    found: dict[str, float] = json.loads(kept.read_text())
    return found


def _copy_rate(ctx: CaseContext) -> float:
    """GB/s of copying a tensor, grown until one copy takes long enough (64 MiB to 2 GiB)."""
    size = 64 * MIB
    while True:
        source = torch.ones(size // 4, device=ctx.device)
        target = torch.empty_like(source)
        seconds = seconds_of(ctx, partial(target.copy_, source))
        if seconds >= LONG_ENOUGH / 4 or size >= 2**31:
            return 2 * size / seconds / 1e9
        size *= 2


def _matrix_rate(ctx: CaseContext, dtype: str) -> float:
    """GFLOP/s of a square product, the best of sizes from 256 up to where one takes long enough."""
    best, size = 0.0, 256
    while size <= 8192:
        a = ctx.normal(size, size, dtype=dtype)
        b = a.t().contiguous()
        seconds = seconds_of(ctx, partial(torch.matmul, a, b))
        best = max(best, 2 * size**3 / seconds / 1e9)
        if seconds >= LONG_ENOUGH:
            break
        size *= 2
    return best


def against_copy(ctx: CaseContext, dtype: str, work: Callable[[], Any], moved: int) -> None:
    """Measure `work`, which must move `moved` bytes, against the copy bandwidth."""
    achieved = moved / seconds_of(ctx, work) / 1e9
    ctx.metrics.update(gb_s=achieved, share=achieved / ceilings(ctx, dtype)["gb_s"])


def against_products(ctx: CaseContext, dtype: str, work: Callable[[], Any], operations: float) -> None:
    """Measure `work`, which must do `operations`, against the matrix rate."""
    achieved = operations / seconds_of(ctx, work) / 1e9
    ctx.metrics.update(gflop_s=achieved, share=achieved / ceilings(ctx, dtype)["gflop_s"])


def device(ctx: CaseContext, dtype: str) -> None:
    """The yardsticks themselves."""
    ctx.require_dtype(dtype)
    if ctx.backend.runtime is not None:
        ctx.unsupported("the backend runs whole models through its runtime, and torch may not run on its device")
    ctx.metrics.update(ceilings(ctx, dtype))


def _paged(
    ctx: CaseContext, dtype: str, sequences: int, query_len: int, seq_len: int
) -> tuple[Paged, Callable[[], Any]]:
    """A filled cache of 8 key-value heads of size 64 and the call of attention over it, 32 query heads."""
    paged = Paged(ctx, Setting(dtype=dtype, num_heads=32, num_kv_heads=8), num_blocks=2048)
    count = min(sequences, len(paged.free) * paged.block_size // seq_len)
    seqs = [paged.sequence(query_len, seq_len) for _ in range(count)]
    for seq in seqs:
        key, value = paged.make_kv(seq.seq_len, strided=False)
        blocks = torch.tensor(seq.blocks)[:, None] * paged.block_size + torch.arange(paged.block_size)
        mapping = blocks.flatten()[: seq.seq_len].to(ctx.device)
        ctx.attention.reshape_and_cache(key, value, paged.caches[0], mapping)
    query, metadata = paged.make_query(count * query_len, strided=False), paged.metadata(seqs)
    params, _ = paged.params()
    out = torch.empty_like(query)
    return paged, lambda: ctx.attention.forward(query, paged.caches[0], metadata, params, out)


def attention_decode(ctx: CaseContext, dtype: str) -> None:
    """One token for each of up to 16 sequences of 1,024: every key and value is read once."""
    paged, work = _paged(ctx, dtype, sequences=16, query_len=1, seq_len=1024)
    count = paged.num_blocks - len(paged.free)
    against_copy(ctx, dtype, work, count * paged.layout.page_bytes)


def attention_prefill(ctx: CaseContext, dtype: str) -> None:
    """One prompt of 1,024 tokens: two products of half a square for each of 32 heads."""
    _, work = _paged(ctx, dtype, sequences=1, query_len=1024, seq_len=1024)
    against_products(ctx, dtype, work, 4 * 64 * 32 * 1024 * 1025 / 2)


def cache_write(ctx: CaseContext, dtype: str) -> None:
    paged = Paged(ctx, Setting(dtype=dtype, num_heads=8, num_kv_heads=8), num_blocks=1024)
    count = 4096
    key, value = paged.make_kv(count, strided=False)
    slots = torch.randperm(paged.num_blocks * paged.block_size, generator=ctx.rng)[:count].to(ctx.device)
    cache = paged.caches[0]
    moved = 2 * (key.nbytes + value.nbytes)
    against_copy(ctx, dtype, lambda: ctx.attention.reshape_and_cache(key, value, cache, slots), moved)


def copy_blocks(ctx: CaseContext, dtype: str) -> None:
    paged = Paged(ctx, Setting(dtype=dtype, num_heads=8, num_kv_heads=8), num_blocks=1024)
    order = ctx.permutation(paged.num_blocks)
    pairs = list(zip(order[:512], order[512:], strict=True))
    moved = 2 * 512 * paged.layout.page_bytes
    against_copy(ctx, dtype, lambda: ctx.attention.copy_blocks(paged.caches, pairs), moved)


def rms_norm(ctx: CaseContext, dtype: str) -> None:
    op = ctx.require_op("rms_norm", dtype)
    x, weight = ctx.normal(2048, 4096, dtype=dtype), ctx.normal(4096, dtype=dtype)
    against_copy(ctx, dtype, lambda: op(x, weight, 1e-6), 2 * x.nbytes)


def silu_and_mul(ctx: CaseContext, dtype: str) -> None:
    op = ctx.require_op("silu_and_mul", dtype)
    x = ctx.normal(2048, 2 * 4096, dtype=dtype)
    against_copy(ctx, dtype, lambda: op(x), x.nbytes * 3 // 2)


def rotary_embedding(ctx: CaseContext, dtype: str) -> None:
    op = ctx.require_op("rotary_embedding", dtype)
    query, key = ctx.normal(2048, 32, 64, dtype=dtype), ctx.normal(2048, 8, 64, dtype=dtype)
    positions = torch.arange(2048, device=ctx.device)
    table = ctx.normal(2048, 64)
    moved = 2 * (query.nbytes + key.nbytes) + table.nbytes
    against_copy(ctx, dtype, lambda: op(positions, query, key, table, False), moved)


def linear_one_row(ctx: CaseContext, dtype: str) -> None:
    """A decode step of one sequence: the weight is read once."""
    pack = ctx.require_op("pack_linear", dtype)
    weight, x = ctx.normal(4096, 4096, dtype=dtype, scale=1 / 64), ctx.normal(1, 4096, dtype=dtype)
    linear = pack(weight, None)
    against_copy(ctx, dtype, lambda: linear(x), weight.nbytes)


def linear_many_rows(ctx: CaseContext, dtype: str) -> None:
    pack = ctx.require_op("pack_linear", dtype)
    weight, x = ctx.normal(2048, 2048, dtype=dtype, scale=1 / 45), ctx.normal(512, 2048, dtype=dtype)
    linear = pack(weight, None)
    against_products(ctx, dtype, lambda: linear(x), 2.0 * 512 * 2048 * 2048)


#: op and name of a case: what it runs.
MEASURES: dict[tuple[str, str], Callable[[CaseContext, str], None]] = {
    ("device", "ceilings"): device,
    ("attention", "decode"): attention_decode,
    ("attention", "prefill"): attention_prefill,
    ("reshape_and_cache", "write"): cache_write,
    ("copy_blocks", "copy"): copy_blocks,
    ("rms_norm", "wide"): rms_norm,
    ("silu_and_mul", "wide"): silu_and_mul,
    ("rotary_embedding", "prompt"): rotary_embedding,
    ("pack_linear", "one_row"): linear_one_row,
    ("pack_linear", "many_rows"): linear_many_rows,
}


def measured(op: str, name: str, dtype: str) -> Case:
    def run(ctx: CaseContext) -> None:
        MEASURES[op, name](ctx, dtype)

    return Case(6, op, f"{name}[{dtype}]", run)


def cases() -> list[Case]:
    return [measured(op, name, dtype) for op, name in MEASURES for dtype in DTYPES]
