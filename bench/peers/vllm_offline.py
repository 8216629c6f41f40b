"""Offline throughput of vLLM; run it with the Python that has vLLM. Prints one line of JSON.

usage: vllm_offline.py MODEL_DIR WORKLOAD.json NUM_REQUESTS
"""

import json
import sys
import time


def main(model: str, workload: str, num_requests: int) -> dict[str, float]:
    from vllm import LLM, SamplingParams

    with open(workload, encoding="utf-8") as file:
        requests = json.load(file)[:num_requests]
    llm = LLM(model=model, dtype="bfloat16", max_model_len=2048, max_num_seqs=32)

    def exactly(tokens: int) -> SamplingParams:
        return SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)

    llm.generate([requests[0]["prompt"]], exactly(8), use_tqdm=False)
    llm.reset_prefix_cache()
    lengths = [exactly(request["output_tokens"]) for request in requests]
    begun = time.perf_counter()
    outputs = llm.generate([request["prompt"] for request in requests], lengths, use_tqdm=False)
    wall_s = time.perf_counter() - begun
    output_tokens = sum(len(output.outputs[0].token_ids) for output in outputs)
    begun = time.perf_counter()
    llm.generate([{"prompt_token_ids": [1]}], exactly(129), use_tqdm=False)
    stream_s = time.perf_counter() - begun
    return {
        "single_stream_tok_per_s": 128 / stream_s,
        "wall_s": wall_s,
        "output_tokens": output_tokens,
        "output_tok_per_s": output_tokens / wall_s,
    }


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1], sys.argv[2], int(sys.argv[3]))))
