"""With and without speculation, in turns, on texts that repeat themselves and on one that does not.

usage: bench_speculation.py [--model M] [--device D] [--quantization Q] [--sequences 1 16] [--rounds 3] [--json]
"""

from __future__ import annotations

import argparse
import json
import statistics
import time

from enginecore import LLM, SamplingParams

RECORDS = " ".join(f"name=item{i} colour=red size={3 * i} ;" for i in range(20))
STORY = "A short story about a lighthouse keeper who finds a letter:"
#: The prompt and the temperature of the answer.
WORK = {
    "a list that the prompt has, repeated": (f"List of records: {RECORDS} Again, the list of records:", 0.0),
    "a story, greedy, told in circles": (STORY, 0.0),
    "a story, sampled, which repeats little": (STORY, 1.0),
}


def answer(llm: LLM, prompt: str, temperature: float, count: int) -> tuple[list[list[int]], float, float]:
    """The answers to `count` requests at once, tokens a second, and the share of the guesses that were kept."""
    prompts = [f"{i}. {prompt}" for i in range(count)]
    params = [SamplingParams(temperature=temperature, seed=i, max_tokens=128, ignore_eos=True) for i in range(count)]
    llm.generate(prompts, SamplingParams(temperature=0, max_tokens=2), use_tqdm=False)  # prompts are computed here
    before, begun = llm._client.call("stats"), time.perf_counter()
    outputs = llm.generate(prompts, params, use_tqdm=False)
    seconds, after = time.perf_counter() - begun, llm._client.call("stats")
    tokens = [output.outputs[0].token_ids for output in outputs]
    drafted = after.num_drafted - before.num_drafted
    kept = (after.num_accepted - before.num_accepted) / drafted if drafted else 0.0
    return tokens, sum(map(len, tokens)) / seconds, kept


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--quantization", default="auto")
    parser.add_argument("--sequences", type=int, nargs="+", default=[1, 16])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    rates: dict[tuple[str, int], dict[str, list[float]]] = {}
    kept: dict[tuple[str, int], float] = {}
    for _ in range(args.rounds):
        answers: dict[tuple[str, int], list[list[int]]] = {}
        for speculation in ("off", "ngram"):
            with LLM(args.model, device=args.device, dtype=args.dtype, quantization=args.quantization,
                     max_model_len=2048, kv_cache_memory=512 << 20, speculation=speculation) as llm:  # fmt: skip
                answer(llm, STORY, 0.0, max(args.sequences))
                for name, (prompt, temperature) in WORK.items():
                    for count in args.sequences:
                        tokens, rate, kept[name, count] = answer(llm, prompt, temperature, count)
                        rates.setdefault((name, count), {"off": [], "ngram": []})[speculation].append(rate)
                        assert answers.setdefault((name, count), tokens) == tokens, "speculation changed it"
    rows = []
    for (name, count), of in rates.items():
        middle = {kind: statistics.median(values) for kind, values in of.items()}
        rows.append({"text": name, "sequences": count, **middle, "ratio": middle["ngram"] / middle["off"],
                     "kept": kept[name, count]})  # fmt: skip
    if args.json:
        print(json.dumps(rows))
        return
    for row in rows:
        print(f"{row['text']}, {row['sequences']} at once: {row['off']:.0f} -> {row['ngram']:.0f} tokens/s "
              f"({row['ratio']:.2f}x), {row['kept']:.0%} of the guesses kept")  # fmt: skip


if __name__ == "__main__":
    main()
