"""Write core/enginecore/cli/data/beam_profile.json: how peaked a real model's predictions are.

    .venv/bin/python tools/write_beam_profile.py

The small model answers the built-in workload greedily; of every third position the best log-probabilities are kept,
without their tokens. `enginecore bench kv-policies` draws from them to decide which beams go on.
"""

from __future__ import annotations

import json
from pathlib import Path

from enginecore import LLM, SamplingParams
from enginecore.cli.bench_workload import load_workload

TARGET = Path(__file__).resolve().parents[1] / "core" / "enginecore" / "cli" / "data" / "beam_profile.json"
TOP, EVERY, REQUESTS, TOKENS = 12, 3, 24, 48


def main() -> None:
    params = SamplingParams(temperature=0, max_tokens=TOKENS, logprobs=TOP)
    rows = []
    settings = {"dtype": "float32", "max_model_len": 1024, "num_blocks": 1024, "max_logprobs": TOP}
    with LLM("smollm2-135m", device="cpu", **settings) as llm:
        prompts = [item.prompt for item in load_workload(None, REQUESTS)]
        for output in llm.generate(prompts, params, use_tqdm=False):
            for entry in (output.outputs[0].logprobs or [])[::EVERY]:
                best = sorted((value.logprob for value in entry.values()), reverse=True)[:TOP]
                rows.append([round(value, 3) for value in best])
    TARGET.write_text(json.dumps({"model": "smollm2-135m", "rows": rows}, separators=(",", ":")) + "\n")


if __name__ == "__main__":
    main()
