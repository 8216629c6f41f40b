"""What planning ahead does for a device: decode steps with --overlap on and off, in turns.

    python bench/bench_overlap.py [--model smollm2-135m] [--device cpu] [--dtype bfloat16] [--seqs 1 16] [--tokens 150]

Milliseconds a step, best and median over the rounds. In process, without detokenisation: the host does what an engine
process does beside its channel.
"""

from __future__ import annotations

import argparse
import statistics
import time

from enginecore.config import EngineArgs
from enginecore.engine.client import InprocClient
from enginecore.request import EngineRequest, SamplingParams

PROMPT = 16


def step_ms(client: InprocClient, name: str, num_seqs: int, num_tokens: int) -> float:
    """A decode step of so many sequences, from their first token to the last."""
    params = SamplingParams(temperature=0, ignore_eos=True)
    for i in range(num_seqs):
        client.add(EngineRequest(f"{name}-{i}", list(range(10 + i, 10 + i + PROMPT)), params, num_tokens))
    begun = 0.0
    while client.has_work():
        if client.step().outputs and not begun:
            begun = time.perf_counter()
    return (time.perf_counter() - begun) / (num_tokens - 1) * 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--seqs", type=int, nargs="+", default=[1, 16])
    parser.add_argument("--tokens", type=int, default=150)
    parser.add_argument("--rounds", type=int, default=2, help="engines that are built for each setting, in turns")
    options = parser.parse_args()
    for num_seqs in options.seqs:
        found: dict[str, list[float]] = {"off": [], "on": []}
        for _ in range(options.rounds):
            for overlap, times in found.items():
                client = InprocClient(EngineArgs(
                    model=options.model, device=options.device, dtype=options.dtype, max_num_seqs=num_seqs,
                    max_model_len=PROMPT + options.tokens,
                    num_blocks=num_seqs * (-(-(PROMPT + options.tokens) // 16) + 1),
                    enable_prefix_caching=False, overlap=overlap,  # type: ignore[arg-type]
                ))  # fmt: skip
                times += [step_ms(client, str(i), num_seqs, options.tokens) for i in range(3)]
                client.shutdown()
        told = ", ".join(f"{name} {min(t):.2f} (median {statistics.median(t):.2f})" for name, t in found.items())
        print(f"{num_seqs} sequences, ms a step: {told}")


if __name__ == "__main__":
    main()
