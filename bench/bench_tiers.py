"""Time to the first token of a long prompt: computed, from host memory, and from disk after a restart.

    python bench/bench_tiers.py [--model M] [--device cpu] [--dtype D] [--tokens 2000] [--prompts 3] [--json]

The device's cache holds one prompt at a time, so that each prompt evicts the one before it. Prompts are random tokens.
The engine runs in this process; the disk tier's files are in a temporary folder and most likely still in the system's
page cache when they are read.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import tempfile
import time
from typing import Any

from enginecore.config import EngineArgs
from enginecore.engine.client import InprocClient
from enginecore.request import EngineRequest, SamplingParams


def first_token(client: InprocClient, prompt: list[int]) -> tuple[float, int, int]:
    """(seconds, the token, prompt tokens that were not computed)."""
    begun = time.perf_counter()
    client.add(EngineRequest(f"{begun}", prompt, SamplingParams(temperature=0), 1))
    while client.has_work():
        for output in client.step().outputs:
            return time.perf_counter() - begun, output.token_ids[0], output.num_cached_tokens
    raise AssertionError("no token")


def settle(client: InprocClient) -> None:
    """Until copies and writes are done: the question is what a hit costs, not how soon it is one."""
    while client._engine.tidy():
        time.sleep(0.005)


def measure(args: argparse.Namespace) -> dict[str, Any]:
    rng = random.Random(0)
    prompts = [[rng.randrange(1000, 30_000) for _ in range(args.tokens)] for _ in range(args.prompts)]
    blocks = -(-args.tokens // 16) + 1
    figures: dict[str, list[float]] = {"computed": [], "host memory": [], "disk": []}
    with tempfile.TemporaryDirectory() as folder:
        settings = EngineArgs(
            model=args.model, device=args.device, dtype=args.dtype, max_model_len=blocks * 16, num_blocks=blocks,
            max_num_seqs=2, kv_host_memory=args.host_bytes, kv_disk=folder,
        )  # fmt: skip
        tokens = []
        for names in (("computed", "host memory"), ("disk",)):
            client = InprocClient(settings)
            first_token(client, [5] * 64)  # what only the first step pays for
            try:
                for name in names:
                    for number, prompt in enumerate(prompts):
                        seconds, token, cached = first_token(client, prompt)
                        figures[name].append(seconds)
                        tokens.append(token)
                        assert token == tokens[number], "another token than when it was computed"
                        assert (cached > 0.98 * args.tokens - 16) == (name != "computed"), (name, cached)
                        settle(client)
            finally:
                client.shutdown()
    medians = {name: statistics.median(values) for name, values in figures.items()}
    times = {name: medians["computed"] / median for name, median in medians.items()}
    return {"tokens": args.tokens, "seconds": figures, "median_s": medians, "times_faster": times}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--tokens", type=int, default=2000)
    parser.add_argument("--prompts", type=int, default=3)
    parser.add_argument("--host-bytes", type=int, default=2 * 2**30)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    result = measure(args)
    if args.json:
        print(json.dumps(result))
        return
    print(f"{'prefix':12} {'median ms':>10} {'times faster':>13}   ms of each prompt")
    for name, median in result["median_s"].items():
        each = " ".join(f"{seconds * 1e3:.0f}" for seconds in result["seconds"][name])
        print(f"{name:12} {median * 1e3:10.0f} {result['times_faster'][name]:13.1f}   {each}")


if __name__ == "__main__":
    main()
