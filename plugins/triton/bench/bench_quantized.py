"""Products with weights of four and eight bits beside torch's product in the activations' dtype.

    python plugins/triton/bench/bench_quantized.py [--inputs 4096 --outputs 14336]

One JSON object a line; "speedup" is over torch, "fraction" is of the bandwidth of a copy, for the bytes of the weight.
"""

from __future__ import annotations

import argparse
import json
from typing import Any

import torch
from enginecore.ops.int4 import Int4Weight
from enginecore.ops.scaled import scaled
from enginecore_triton.ops.pack_linear import pack_linear
from measure import copy_bandwidth, description, device, seconds


def weights(inputs: int, outputs: int, dtype: torch.dtype, where: torch.device) -> dict[str, Any]:
    words = torch.randint(-(2**31), 2**31 - 1, (inputs // 8, outputs), dtype=torch.int32, device=where)
    scales = torch.rand(inputs // 128, outputs, device=where).half() / 100
    zeros = torch.randint(0, 16, scales.shape, device=where).to(torch.uint8)
    eight = torch.randint(-100, 100, (outputs, inputs), dtype=torch.int8, device=where)
    floats, one = eight.to(dtype).to(torch.float8_e4m3fn), torch.rand(outputs, device=where) / 100
    blocks = torch.rand(-(-outputs // 128), -(-inputs // 128), device=where) / 100
    return {
        "int4, groups of 128": Int4Weight(words, scales, zeros, 128, dtype),
        "int8": scaled("int8", eight, one, dtype),
        "fp8": scaled("fp8", floats, one, dtype),
        "fp8, 128 x 128": scaled("fp8", floats, blocks, dtype, (128, 128)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--inputs", type=int, default=4096)
    parser.add_argument("--outputs", type=int, default=14336)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 16, 128, 4096])
    args = parser.parse_args()
    where, dtype = device(), getattr(torch, args.dtype)
    shape, bandwidth = description(where), copy_bandwidth()
    plain = torch.randn(args.outputs, args.inputs, device=where).to(dtype)
    packed = {
        name: pack_linear(weight, None, device=shape)
        for name, weight in weights(args.inputs, args.outputs, dtype, where).items()
    }
    for rows in args.rows:
        x = torch.randn(rows, args.inputs, device=where).to(dtype)
        base = seconds([lambda x=x: x @ plain.t()])
        print(json.dumps({"weight": args.dtype, "rows": rows, "us": round(base * 1e6, 1)}))
        for name, linear in packed.items():
            spent = seconds([lambda x=x, linear=linear: linear(x)])
            figures = {"weight": name, "rows": rows, "us": round(spent * 1e6, 1), "speedup": round(base / spent, 2)}
            print(json.dumps({**figures, "fraction": round(linear.nbytes / spent / bandwidth, 3)}))


if __name__ == "__main__":
    main()
