"""Paged attention: decode against the cache's bytes, prefill against the matrix rate; and the cache write.

python plugins/cpu/bench/bench_attention.py [--dtype float32] [--heads 9] [--kv-heads 3] [--head-size 64]
"""

from __future__ import annotations

import argparse
from functools import partial

import torch
from enginecore.device import AttentionMetadata, AttentionParams, BackendContext, KVCacheSpec
from enginecore_cpu import native
from enginecore_cpu.backend import CpuBackend
from limits import matrix_rate, read_bandwidth, seconds

BLOCK = 16


def batch(sequences: list[tuple[int, int]]) -> tuple[AttentionMetadata, int]:
    """Metadata for (cached, new) tokens of each sequence, blocks in random order."""
    need = [-(-(cached + new) // BLOCK) for cached, new in sequences]
    order = torch.randperm(sum(need)).tolist()
    table = torch.zeros(len(need), max(need), dtype=torch.int32)
    slots, starts = [], [0]
    for i, (cached, new) in enumerate(sequences):
        blocks = [order.pop() for _ in range(need[i])]
        table[i, : need[i]] = torch.tensor(blocks)
        slots += [blocks[p // BLOCK] * BLOCK + p % BLOCK for p in range(cached, cached + new)]
        starts.append(starts[-1] + new)
    lengths = [cached + new for cached, new in sequences]
    return AttentionMetadata(
        query_start_loc=torch.tensor(starts, dtype=torch.int32),
        seq_lens=torch.tensor(lengths, dtype=torch.int32),
        block_table=table,
        slot_mapping=torch.tensor(slots),
        max_query_len=max(n for _, n in sequences),
        max_seq_len=max(lengths),
    ), sum(need)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--heads", type=int, default=9)
    parser.add_argument("--kv-heads", type=int, default=3)
    parser.add_argument("--head-size", type=int, default=64)
    parser.add_argument("--threads", type=int, default=None)
    args = parser.parse_args()
    backend = CpuBackend(BackendContext(device="cpu", num_threads=args.threads))
    kernels = native.load().Kernels(backend.num_threads, "")
    dtype = getattr(torch, args.dtype)
    bandwidth, rate = read_bandwidth(kernels), matrix_rate(kernels, dtype)
    print(
        f"{backend.capabilities.isa[0]}, {backend.num_threads} threads: read {bandwidth:.1f} GB/s, "
        f"matrix {rate:.0f} GFLOP/s"
    )
    heads, kv_heads, size = args.heads, args.kv_heads, args.head_size
    spec = KVCacheSpec(num_layers=1, num_kv_heads=kv_heads, head_size=size, dtype=args.dtype, block_size=BLOCK)
    params = AttentionParams(scale=size**-0.5, num_heads=heads, num_kv_heads=kv_heads, head_size=size)
    cases = [
        ("decode 1 x 100", [(99, 1)]),
        ("decode 1 x 1000", [(999, 1)]),
        ("decode 1 x 8000", [(7999, 1)]),
        ("decode 32 x 200", [(199, 1)] * 32),
        ("decode 32 x 1000", [(999, 1)] * 32),
        ("prefill 128", [(0, 128)]),
        ("prefill 512", [(0, 512)]),
        ("prefill 1024", [(0, 1024)]),
        ("prefill 512 after 3500", [(3500, 512)]),
        ("mixed 300 + 31 x 200", [(0, 300)] + [(199, 1)] * 31),
    ]
    for name, sequences in cases:
        metadata, blocks = batch(sequences)
        (cache,) = backend.memory.allocate_kv(backend.attention.kv_cache_layout(spec), blocks, 1)
        cache.normal_()
        tokens = sum(new for _, new in sequences)
        fused = torch.randn(tokens, heads + 2 * kv_heads, size).to(dtype)
        query, key, value = fused.split([heads, kv_heads, kv_heads], 1)
        out = torch.empty(tokens, heads, size, dtype=dtype)
        attend = partial(backend.attention.forward, query, cache, metadata, params, out)
        time = seconds(attend, threads=backend.num_threads)
        store = partial(backend.attention.reshape_and_cache, key, value, cache, metadata.slot_mapping)
        write = seconds(store, threads=backend.num_threads)
        pairs = sum(new * cached + new * (new + 1) // 2 for cached, new in sequences)
        operations = 4 * pairs * heads * size
        read = sum(cached + new for cached, new in sequences) * 2 * kv_heads * size * dtype.itemsize
        limit = max(operations / rate, read / bandwidth) / 1e9
        print(
            f"{name:24} {time * 1e6:9.1f} us {operations / time / 1e9:7.1f} GFLOP/s {read / time / 1e9:6.1f} GB/s"
            f"  {100 * limit / time:3.0f}% of the limit; cache write {write * 1e6:6.1f} us"
        )


if __name__ == "__main__":
    main()
