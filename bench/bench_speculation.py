"""One stream with and without speculation, in turns, on a text that repeats itself and on one that does not.

usage: bench_speculation.py [--model M] [--device D] [--rounds 3] [--json]
"""

from __future__ import annotations

import argparse
import json
import statistics
import time

from enginecore import LLM, SamplingParams

RECORDS = " ".join(f"name=item{i} colour=red size={3 * i} ;" for i in range(20))
PROMPTS = {
    "repeats its prompt": f"List of records: {RECORDS} Again, the list of records:",
    "does not": "A short story about a lighthouse keeper who finds a letter:",
}
ANSWER = SamplingParams(temperature=0, max_tokens=128, ignore_eos=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    rates: dict[str, dict[str, list[float]]] = {name: {"off": [], "ngram": []} for name in PROMPTS}
    accepted: dict[str, float] = {}
    for _ in range(args.rounds):
        answers: dict[str, list[int]] = {}
        for speculation in ("off", "ngram"):
            with LLM(args.model, device=args.device, dtype=args.dtype, max_model_len=2048,
                     kv_cache_memory=256 << 20, speculation=speculation) as llm:  # fmt: skip
                for name, prompt in PROMPTS.items():
                    llm.generate([prompt], SamplingParams(temperature=0, max_tokens=2), use_tqdm=False)
                    before, begun = llm._client.call("stats"), time.perf_counter()
                    output = llm.generate([prompt], ANSWER, use_tqdm=False)[0].outputs[0]
                    rates[name][speculation].append(len(output.token_ids) / (time.perf_counter() - begun))
                    assert answers.setdefault(name, output.token_ids) == output.token_ids, "speculation changed it"
                    after = llm._client.call("stats")
                    drafted = after.num_drafted - before.num_drafted
                    accepted[name] = (after.num_accepted - before.num_accepted) / drafted if drafted else 0.0
    result = {}
    for name, of in rates.items():
        middle = {kind: statistics.median(values) for kind, values in of.items()}
        result[name] = {**middle, "ratio": middle["ngram"] / middle["off"], "accepted": accepted[name]}
    if args.json:
        print(json.dumps(result))
        return
    for name, row in result.items():
        print(f"{name}: {row['off']:.0f} -> {row['ngram']:.0f} tokens/s ({row['ratio']:.2f}x), "
              f"{row['accepted']:.0%} of the guesses kept")  # fmt: skip


if __name__ == "__main__":
    main()
