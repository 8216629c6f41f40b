"""Try tuning configs of the attention kernels on this device and print the quickest as rows for `configs/OP.json`.

    python plugins/triton/bench/tune.py paged_decode [--head-size 128] [--kv int8]    one head size a run, some minutes

Configs that do not build are left out. Paste the row under the architecture, before rows of larger sizes.
"""

from __future__ import annotations

import argparse
import itertools
import json
from typing import Any
from unittest import mock

from enginecore_triton import configs
from enginecore_triton.attention_backend import TritonAttention
from enginecore_triton.configs import Config
from enginecore_triton.parts import cannot_build
from measure import description, device, seconds
from paged import Bench

#: op -> (batches of (tokens in the step, tokens in all), whose times are added; constants to try, warps, stages).
SEARCH = {
    "paged_decode": ([[(1, 4096)] * 64, [(1, 4096)] * 4], {"BLOCK_N": (32, 64, 128)}, (2, 4, 8), (1, 2, 3, 4)),
    "paged_prefill": (
        [[(4096, 4096)], [(512, 1024)] * 4], {"BLOCK_M": (64, 128), "BLOCK_N": (32, 64, 128)}, (4, 8), (1, 2, 3, 4),
    ),
}  # fmt: skip
SMALL = {
    "paged_decode": ([[(1, 30)]], {"BLOCK_N": (16,)}, (4,), (1,)),
    "paged_prefill": ([[(20, 20), (1, 9)]], {"BLOCK_M": (16,), "BLOCK_N": (16,)}, (4,), (1,)),
}


def candidates(constants: dict[str, tuple[int, ...]], warps: tuple[int, ...], stages: tuple[int, ...]) -> list[Config]:
    chosen = [dict(zip(constants, values, strict=True)) for values in itertools.product(*constants.values())]
    return [Config(c, {"num_warps": w, "num_stages": s}) for c, w, s in itertools.product(chosen, warps, stages)]


def replaced(tried: str, config: Config) -> Any:
    """`configs.pick` with `config` for the op that is tuned."""
    pick = configs.pick
    return lambda op, architecture, **sizes: config if op == tried else pick(op, architecture, **sizes)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("op", choices=SEARCH)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--kv", default="")
    parser.add_argument("--heads", type=int, default=64)
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--head-size", type=int, default=128)
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument("--small", action="store_true", help="tiny sizes, to try the script itself")
    args = parser.parse_args()
    where = device()
    attention = TritonAttention(description(where))
    batches, constants, warps, stages = (SMALL if args.small else SEARCH)[args.op]
    benches = [
        Bench(
            attention, pairs, where, dtype=args.dtype, kv=args.kv or args.dtype, heads=args.heads,
            kv_heads=args.kv_heads, size=args.head_size, block_size=args.block_size, copies=2,
        )
        for pairs in batches
    ]  # fmt: skip
    timed = []
    for config in candidates(constants, warps, stages):
        with mock.patch.object(configs, "pick", replaced(args.op, config)):
            try:
                timed.append((sum(seconds(bench.runs(), repeat=10) for bench in benches), config))
            except Exception as error:
                if not cannot_build(error):
                    raise
    for spent, config in sorted(timed, key=lambda pair: pair[0])[:5]:
        row = {"constants": config.constants, "options": config.options}
        print(json.dumps({"us": round(spent * 1e6, 1), "row": row}))


if __name__ == "__main__":
    main()
