"""What following a grammar costs a step, and what forced text saves: 16 sequences of the small model, all free, all in
a grammar computed token by token, and all in one with forced tokens taken together.

    python bench/bench_grammar.py [--model smollm2-135m] [--batch 16]

Milliseconds a step and steps an answer; a warm-up of each comes first. "Host" is what masks, matchers and forced tokens
take of it beside the model, measured by calls of `Grammars`.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

from enginecore import LLM, SamplingParams
from enginecore.runner.grammar import Grammars

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "customer_name": {"type": "string", "maxLength": 16}, "account_number": {"type": "integer", "minimum": 0},
        "account_status": {"enum": ["active", "suspended", "closed"]},
        "shipping_address": {"type": "object", "properties": {
            "street": {"type": "string", "maxLength": 16}, "postal_code": {"type": "string", "pattern": "^[0-9]{5}$"}},
            "required": ["street", "postal_code"], "additionalProperties": False},
    },
    "required": ["customer_name", "account_number", "account_status", "shipping_address"],
    "additionalProperties": False,
}  # fmt: skip
PROMPT = "<|im_start|>user\nAn account as JSON, please.<|im_end|>\n<|im_start|>assistant\n"


class Stopwatch:
    """Adds up what calls of some methods take."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        for name in ("begin", "apply", "advance"):
            setattr(Grammars, name, self._timed(name, getattr(Grammars, name)))

    def _timed(self, name: str, method: Any) -> Any:
        def timed(*args: Any, **options: Any) -> Any:
            begun = time.perf_counter()
            try:
                return method(*args, **options)
            finally:
                self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - begun

        return timed


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--model", default="smollm2-135m")
    options.add_argument("--batch", type=int, default=16)
    args = options.parse_args()
    watch = Stopwatch()
    wanted = {"json": SCHEMA, "disable_any_whitespace": True}
    runs: dict[str, dict[str, Any]] = {
        "free": {"max_tokens": 64, "ignore_eos": True},
        "grammar, token by token": {"max_tokens": 120, "structured_outputs": wanted, "logit_bias": {0: 0.0}},
        "grammar, forced text at once": {"max_tokens": 120, "structured_outputs": wanted},
    }
    with LLM(args.model, dtype="float32", max_model_len=256, num_blocks=512, max_num_seqs=args.batch) as llm:
        engine = llm._client._engine
        for name, params in runs.items():
            jobs = [SamplingParams(temperature=1, seed=seed, **params) for seed in range(args.batch)]
            for _ in range(2):  # the first is the warm-up
                watch.seconds, steps = {}, engine.stats().num_steps
                begun = time.perf_counter()
                outputs = llm.generate([PROMPT] * args.batch, jobs, use_tqdm=False)
                seconds, steps = time.perf_counter() - begun, engine.stats().num_steps - steps
            tokens = sum(len(output.outputs[0].token_ids) for output in outputs)
            host = ", ".join(f"{part} {spent / steps * 1e3:.2f}" for part, spent in watch.seconds.items())
            print(
                f"{name:30} {seconds / steps * 1e3:7.2f} ms a step, {steps:4} steps for {tokens} tokens, "
                f"{tokens / seconds:6.0f} tokens/s; host: {host}"
            )


if __name__ == "__main__":
    main()
