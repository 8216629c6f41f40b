"""Experts, adapters and recurrences against the bytes they must move, or the rate of torch's own product.

    python plugins/triton/bench/bench_layers.py [--tokens 1 64 4096] [--shrink 16]    (to try it under the interpreter)

One JSON object a line; "fraction" is of the bandwidth of a copy, "rate" in TFLOP/s.
"""

from __future__ import annotations

import argparse
import json

import torch
from enginecore_triton import DeviceDescription
from enginecore_triton.ops.causal_conv import causal_conv
from enginecore_triton.ops.lora import lora_expand, lora_shrink
from enginecore_triton.ops.moe_experts import moe_experts
from enginecore_triton.ops.selective_scan import selective_scan
from enginecore_triton.ops.ssd_scan import ssd_scan
from measure import copy_bandwidth, description, device, seconds


class Bench:
    """`shrink` divides the sizes, which are else those of models of seven billion parameters and more."""

    def __init__(self, dtype: torch.dtype, shrink: int) -> None:
        self.where, self.dtype, self.shrink = device(), dtype, shrink
        self.shape: DeviceDescription = description(self.where)
        self.bandwidth = copy_bandwidth()

    def rand(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, device=self.where).to(self.dtype)

    def experts(self, tokens: int) -> None:
        experts, each, size, inner = 64, 8, 2048 // self.shrink, 1024 // self.shrink
        gate_up, down = self.rand(experts, 2 * inner, size), self.rand(experts, size, inner)
        ids = torch.rand(tokens, experts, device=self.where).topk(each).indices
        weights, x = torch.rand(tokens, each, device=self.where), self.rand(tokens, size)
        spent = seconds([lambda: moe_experts(x, ids, weights, gate_up, down, "silu", device=self.shape)])
        used = int(ids.unique().numel()) * 3 * size * inner
        flops = 6 * tokens * each * size * inner
        self.report("moe_experts", tokens, spent, used * gate_up.itemsize, flops)

    def adapters(self, tokens: int) -> None:
        adapters, rank, size = 16, 16, 4096 // self.shrink
        x, a, b = self.rand(tokens, size), self.rand(1, adapters, rank, size), [self.rand(adapters, size, rank)]
        chosen = torch.arange(tokens, device=self.where) * adapters // tokens

        def run() -> None:
            lora_expand(lora_shrink(x, a, chosen, device=self.shape), b, chosen, x, device=self.shape)

        moved = min(adapters, tokens) * 2 * rank * size + 3 * tokens * size
        self.report("lora", tokens, seconds([run]), moved * x.itemsize, 4 * tokens * rank * size)

    def recurrences(self, tokens: int) -> None:
        decoding = tokens < 1024  # few tokens: one a sequence; many: one sequence
        number, longest = (tokens, 1) if decoding else (1, tokens)
        starts = torch.arange(0, tokens + 1, longest, device=self.where)
        slots = torch.arange(number, device=self.where)
        places = starts, slots, slots >= 0
        heads, head_size, size = 80 // self.shrink, 64, 128
        x, dt, a = self.rand(tokens, heads, head_size), self.rand(tokens, heads), -torch.rand(heads, device=self.where)
        b, c = self.rand(tokens, 1, size), self.rand(tokens, 1, size)
        states = torch.zeros(number, heads, head_size, size, device=self.where)
        spent = seconds([lambda: ssd_scan(x, dt, a, b, c, None, x, None, True, states, *places, longest,
                                          device=self.shape)])  # fmt: skip
        self.report("ssd_scan", tokens, spent, 2 * states.nbytes + 3 * x.nbytes, 6 * x.numel() * size)
        channels = 4096 // self.shrink
        x, state = self.rand(tokens, channels), torch.zeros(number, channels, 16, device=self.where)
        a, b = -torch.rand(channels, 16, device=self.where), self.rand(tokens, 16)
        spent = seconds([lambda: selective_scan(x, x, a, b, b, None, x, None, True, state, *places, longest,
                                                device=self.shape)])  # fmt: skip
        self.report("selective_scan", tokens, spent, 2 * state.nbytes + 4 * x.nbytes, 6 * x.numel() * 16)
        weight, kept = self.rand(channels, 4), self.rand(number, channels, 3)
        spent = seconds([lambda: causal_conv(x, weight, None, kept, *places, True, longest, device=self.shape)])
        self.report("causal_conv", tokens, spent, 2 * kept.nbytes + 2 * x.nbytes, 8 * x.numel())

    def report(self, op: str, tokens: int, spent: float, moved: int, flops: int) -> None:
        figures = {"op": op, "tokens": tokens, "us": round(spent * 1e6, 1)}
        rates = {"fraction": round(moved / spent / self.bandwidth, 3), "rate": round(flops / spent / 1e12, 2)}
        print(json.dumps({**figures, **rates}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 64, 4096])
    parser.add_argument("--shrink", type=int, default=1)
    args = parser.parse_args()
    bench = Bench(getattr(torch, args.dtype), args.shrink)
    for tokens in args.tokens:
        bench.experts(tokens)
        bench.adapters(tokens)
        bench.recurrences(tokens)


if __name__ == "__main__":
    main()
