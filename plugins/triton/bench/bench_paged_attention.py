"""Decode against the memory's bandwidth, prefill against torch's scaled_dot_product_attention.

    python plugins/triton/bench/bench_paged_attention.py [--heads 64] [--kv-heads 8] [--head-size 128] [--kv int8]

One JSON object a line. "fraction" is of the bandwidth of a copy, measured in the same run.
"""

from __future__ import annotations

import argparse
import json

import torch
import torch.nn.functional as F
from enginecore_triton.attention_backend import TritonAttention
from measure import copy_bandwidth, description, device, seconds
from paged import Bench

DECODE = [(1, 4096), (8, 4096), (64, 512), (64, 4096), (256, 1024), (1, 65536)]
PREFILL = [(1, 512), (1, 2048), (1, 8192), (8, 1024)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--kv", default="", help="dtype of the cache (that of the model)")
    parser.add_argument("--heads", type=int, default=64)
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--head-size", type=int, default=128)
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument("--small", action="store_true", help="tiny sizes, to try the script itself")
    args = parser.parse_args()
    where = device()
    attention = TritonAttention(description(where))
    shape = {
        "dtype": args.dtype, "kv": args.kv or args.dtype, "heads": args.heads, "kv_heads": args.kv_heads,
        "size": args.head_size, "block_size": args.block_size,
    }  # fmt: skip
    bandwidth = copy_bandwidth()
    print(json.dumps({"copy_gb_s": round(bandwidth / 1e9, 1), **shape, "device": str(attention.device)}))
    for sequences, length in [(2, 40)] if args.small else DECODE:
        bench = Bench(attention, [(1, length)] * sequences, where, copies=_copies(sequences * length), **shape)
        rate = bench.read_bytes / seconds(bench.runs())
        figures = {"decode": sequences, "context": length, "gb_s": round(rate / 1e9, 1)}
        print(json.dumps({**figures, "fraction": round(rate / bandwidth, 3)}))
    for sequences, length in [(2, 20)] if args.small else PREFILL:
        bench = Bench(attention, [(length, length)] * sequences, where, copies=1, **shape)
        ours, theirs = seconds(bench.runs()), _torch_seconds(bench, sequences, length)
        figures = {"prefill": sequences, "tokens": length, "tflop_s": round(bench.operations / ours / 1e12, 2)}
        print(json.dumps({**figures, "of_sdpa": round(theirs / ours, 3)}))


def _copies(tokens: int) -> int:
    """Enough caches that none is still in the device's own cache when its turn comes."""
    return max(2, min(64, 500_000 // tokens))


def _torch_seconds(bench: Bench, sequences: int, length: int) -> float:
    """The same work on dense keys and values."""
    p, query = bench.params, bench.query
    query_SHTD = query.view(sequences, length, p.num_heads, p.head_size).transpose(1, 2)
    shape = (sequences, p.num_kv_heads, length, p.head_size)
    key, value = (torch.randn(shape, device=query.device).to(query.dtype) for _ in range(2))

    def attend() -> torch.Tensor:
        return F.scaled_dot_product_attention(query_SHTD, key, value, is_causal=True, scale=p.scale, enable_gqa=True)

    return seconds([attend])


if __name__ == "__main__":
    main()
