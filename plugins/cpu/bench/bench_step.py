"""Time of a whole step while decoding, wall and processor, which other programs on the machine disturb less.

python plugins/cpu/bench/bench_step.py [MODEL] [--quantization gguf] [--sequences 1 32]
"""

from __future__ import annotations

import argparse
import time
from typing import Any

from enginecore.frontend.llm import LLM
from enginecore.request import SamplingParams


class Timed:
    """An engine client whose steps are timed: (wall, processor) seconds each."""

    def __init__(self, client: Any) -> None:
        self._client = client
        self.times: list[tuple[float, float]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)

    def step(self) -> Any:
        wall, processor = time.perf_counter(), time.process_time()
        outputs = self._client.step()
        self.times.append((time.perf_counter() - wall, time.process_time() - processor))
        return outputs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", nargs="?", default="smollm2-135m")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--quantization", default="auto")
    parser.add_argument("--sequences", type=int, nargs="*", default=[1, 32])
    args = parser.parse_args()
    llm = LLM(
        args.model, device="cpu", dtype=args.dtype, quantization=args.quantization, max_model_len=1024,
        max_num_seqs=128,
        speculation="off",  # a step of so many rows is what is measured
    )
    for count in args.sequences:
        timed = llm._client = Timed(getattr(llm._client, "_client", llm._client))
        params = SamplingParams(max_tokens=100 if count == 1 else 40, temperature=0, ignore_eos=True)
        llm.generate([[10 + i, 20, 30] for i in range(count)], params, use_tqdm=False)
        wall, processor = (sorted(side) for side in zip(*timed.times, strict=True))
        print(
            f"{args.quantization}, {count} sequences: wall best {1e3 * wall[0]:.2f} ms; "
            f"processor best {1e3 * processor[0]:.2f} ms, median {1e3 * processor[len(processor) // 2]:.2f} ms"
        )
    llm.shutdown()


if __name__ == "__main__":
    main()
