"""Norms, rotary and activations against the bytes they must move.

    python plugins/triton/bench/bench_pointwise.py [--tokens 4096]

One JSON object a line; "fraction" is of the bandwidth of a copy, measured in the same run.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable

import torch
from enginecore_triton.optable import TritonOps
from measure import copy_bandwidth, description, device, seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--hidden", type=int, default=4096)
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--kv-heads", type=int, default=8)
    args = parser.parse_args()
    where, dtype, tokens, hidden = device(), getattr(torch, args.dtype), args.tokens, args.hidden
    ops, bandwidth = TritonOps(description(where)), copy_bandwidth()

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device=where).to(dtype)

    weight, fused = normal(hidden), normal(tokens, args.heads + 2 * args.kv_heads, 128)
    x, residual, gate = normal(tokens, hidden), normal(tokens, hidden), normal(tokens, 4 * hidden)
    query, key, _ = fused.split([args.heads, args.kv_heads, args.kv_heads], 1)
    positions, table = torch.arange(tokens, device=where), torch.rand(tokens, 128, device=where)
    row = tokens * hidden * dtype.itemsize
    turned = 2 * (query.numel() + key.numel()) * dtype.itemsize + table.nbytes
    cases: dict[str, tuple[int, Callable[[], object]]] = {
        "rms_norm": (2 * row, lambda: run("rms_norm")(x, weight, 1e-6)),
        "fused_add_rms_norm": (4 * row, lambda: run("fused_add_rms_norm")(x, residual, weight, 1e-6)),
        "rotary_embedding": (turned, lambda: run("rotary_embedding")(positions, query, key, table, False)),
        "silu_and_mul": (6 * row, lambda: run("silu_and_mul")(gate)),
    }

    def run(op: str) -> Callable[..., object]:
        impl = ops.get(op)
        assert impl is not None
        return impl.run

    for op, (moved, call) in cases.items():
        spent = seconds([call])
        figures = {"op": op, "us": round(spent * 1e6, 1), "fraction": round(moved / spent / bandwidth, 3)}
        print(json.dumps(figures))


if __name__ == "__main__":
    main()
