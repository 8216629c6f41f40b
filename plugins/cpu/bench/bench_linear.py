"""Packed products: share of the read bandwidth with one row, of the matrix rate with many.

python plugins/cpu/bench/bench_linear.py [--dtype float32] [--scheme int8] [--threads N] [--isa NAME]

With a scheme the weights are bytes or blocks, the limit is the rate of byte products: twice that of bfloat16 where the
processor has both. The time includes rounding the rows to bytes.
"""

from __future__ import annotations

import argparse
import itertools

import torch
from enginecore.ops.quantized import SCHEMES, QuantizedWeight, quantize_int8
from enginecore_cpu import native, system
from limits import matrix_rate, read_bandwidth, seconds

SHAPES = [(576, 960), (576, 576), (576, 3072), (1536, 576), (576, 49152), (2048, 8192)]


def quantized(weight: torch.Tensor, scheme: str) -> QuantizedWeight:
    if scheme == "int8":
        return quantize_int8(weight)
    from gguf.quants import quantize

    blocks = quantize(weight.float().numpy(), SCHEMES[scheme][0])  # type: ignore[arg-type]
    return QuantizedWeight(scheme, torch.from_numpy(blocks), weight.shape[1], weight.dtype)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--scheme", default="", help="int8, q4_1, ...")
    parser.add_argument("--threads", type=int, default=system.cpu_budget().threads)
    parser.add_argument("--isa", default="")
    parser.add_argument("--rows", type=int, nargs="*", default=[1, 4, 8, 16, 32, 64, 128, 512])
    parser.add_argument("--shape", type=int, nargs=2, action="append", help="inputs outputs")
    args = parser.parse_args()
    kernels = native.load().Kernels(args.threads, args.isa)
    dtype = getattr(torch, args.dtype)
    bandwidth, rate = read_bandwidth(kernels), matrix_rate(kernels, dtype) * (2 if args.scheme else 1)
    kind = args.scheme or args.dtype
    print(f"{kernels.isa}, {args.threads} threads, {kind}: read {bandwidth:.1f} GB/s, matrix {rate:.0f} GFLOP/s")
    for inputs, outputs in args.shape or SHAPES:
        weight = torch.randn(outputs, inputs).to(dtype)
        blocks = quantized(weight, args.scheme) if args.scheme else None
        bytes_each = weight.nbytes if blocks is None else blocks.data_OB.nbytes
        # As many copies as it takes to find no weight in a cache, as in a model.
        copies = max(1, min(400, (160 << 20) // bytes_each))
        packed = [
            kernels.linear(weight, None)
            if blocks is None
            else kernels.quant_linear(args.scheme, blocks.data_OB, inputs, None)
            for _ in range(copies)
        ]
        for rows in args.rows:
            if rows > 64 and outputs > 40000:
                continue
            x = torch.randn(rows, inputs).to(dtype)
            y = torch.empty(rows, outputs, dtype=dtype)
            turn = itertools.cycle(packed)
            time = seconds(lambda: next(turn).run(x, y), threads=args.threads)  # noqa: B023
            gbs, gflops = bytes_each / time / 1e9, 2 * rows * inputs * outputs / time / 1e9
            limit = max(bytes_each / bandwidth / 1e9, 2 * rows * inputs * outputs / rate / 1e9)
            print(
                f"{inputs:5} -> {outputs:5}, {rows:4} rows: {time * 1e6:8.1f} us {gbs:6.1f} GB/s {gflops:7.1f} GFLOP/s"
                f"  {100 * limit / time:3.0f}% of the limit"
            )


if __name__ == "__main__":
    main()
