"""Time to first token of prompts that share a long prefix, and the KV memory that answering them together wastes.

    python bench/bench_shared_prefix.py [--prefix 2000] [--requests 32] [--dtype bfloat16] [--json]

One request after the other through the Python API, each with the same prefix and a question of its own: the first
computes the prefix, the others find it. Then sequences of 500 to 600 tokens at once, for the share of KV slots that
hold no token (`kv_waste`).
"""

from __future__ import annotations

import argparse
import json
import statistics
import time

from enginecore.cli.bench_throughput import StepTally
from enginecore.config import EngineArgs
from enginecore.engine.client import InprocClient
from enginecore.request import EngineRequest, SamplingParams


def request(name: str, prompt: list[int], count: int) -> EngineRequest:
    return EngineRequest(name, prompt, SamplingParams(temperature=0, max_tokens=count, ignore_eos=True), count)


def first_token(client: InprocClient, prompt: list[int], name: str) -> tuple[float, float, int]:
    """(seconds until the first token, processor seconds, prompt tokens that were found in the cache)."""
    begun, processor = time.perf_counter(), time.process_time()
    client.add(request(name, prompt, 1))
    cached = 0
    while client.has_work():
        for output in client.step().outputs:
            cached = output.num_cached_tokens
    return time.perf_counter() - begun, time.process_time() - processor, cached


def waste_of_long(client: InprocClient, count: int, length: int) -> float:
    """The share of KV slots held without a token over `count` sequences that grow from 500 tokens to `length`."""
    for i in range(count):
        client.add(request(f"long{i}", [(i * 131 + j * 17) % 40_000 for j in range(500 + i)], length - 500))
    tally = StepTally()
    while client.has_work():
        tally.count(client.step().stats)
    return tally.kv_waste or 0.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--prefix", type=int, default=2000)
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    args = EngineArgs(
        model="smollm2-135m", device="cpu", dtype=options.dtype, max_model_len=options.prefix + 128, num_blocks=2048,
        max_num_seqs=32,
    )  # fmt: skip
    client = InprocClient(args)
    try:
        first_token(client, list(range(100, 164)), "warm-up")
        prefix = [(i * 7919) % 40_000 for i in range(options.prefix)]
        times, processor = [], []
        for i in range(options.requests):
            seconds, processor_seconds, cached = first_token(client, [*prefix, *range(100 + i, 116 + i)], f"r{i}")
            assert (cached >= options.prefix - 16) == (i > 0), "all but the first find the prefix"
            times.append(seconds)
            processor.append(processor_seconds)
        waste = waste_of_long(client, 8, 600)
    finally:
        client.shutdown()
    warm = times[1:]
    report = {
        "cold_ttft_s": times[0],
        "warm_ttft_s": {"median": statistics.median(warm), "max": max(warm)},
        "warm_of_cold": {"median": statistics.median(warm) / times[0], "max": max(warm) / times[0]},
        "processor_time_warm_of_cold": {
            "median": statistics.median(processor[1:]) / processor[0],
            "max": max(processor[1:]) / processor[0],
        },
        "kv_waste_over_500_tokens": waste,
    }
    if options.json:
        print(json.dumps(report, indent=1))
        return
    print(f"cold {times[0]:.3f} s, warm {report['warm_ttft_s']['median']:.3f} s (at most {max(warm):.3f} s)")
    print(f"warm / cold: median {report['warm_of_cold']['median']:.1%}, at most {report['warm_of_cold']['max']:.1%}")
    ratios = report["processor_time_warm_of_cold"]
    print(f"the same in processor time: median {ratios['median']:.1%}, at most {ratios['max']:.1%}")
    print(f"KV slots held without a token, eight sequences of 500 to 600 tokens: {waste:.2%}")


if __name__ == "__main__":
    main()
