"""Perplexity of a fixed text: what rounding of weights and activations costs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from enginecore.cli.bench_report import stamp
from enginecore.cli.bench_throughput import settings_of
from enginecore.cli.bench_workload import WorkItem
from enginecore.cli.common import open_llm
from enginecore.config import EngineArgs
from enginecore.errors import ParameterError
from enginecore.request import SamplingParams


def measure_perplexity(engine: EngineArgs, text: str, window: int, max_tokens: int) -> dict[str, Any]:
    """exp of the mean negative log-likelihood of each token after the first of windows of `window` tokens.

    Windows do not overlap and know nothing of each other. At most `max_tokens` tokens of the text are used.
    """
    with open_llm(engine) as llm:
        ids = llm.get_tokenizer().encode(text)[:max_tokens]
        windows = [ids[at : at + window] for at in range(0, len(ids), window)]
        windows = [part for part in windows if len(part) > 1]
        if not windows:
            raise ParameterError("the text has less than two tokens", param="text")
        wanted = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=0)
        total, count = 0.0, 0
        for output in llm.generate(windows, wanted, use_tqdm=False):
            for token, entry in zip(output.prompt_token_ids, output.prompt_logprobs or [], strict=True):
                if entry is not None:
                    total -= entry[token].logprob
                    count += 1
        return {
            "benchmark": "perplexity",
            "perplexity": math.exp(total / count),
            "mean_nll": total / count,
            "tokens": count,
            "window": window,
            "settings": settings_of(llm),
            **stamp(llm.fingerprint),
        }


def text_of(items: Sequence[WorkItem]) -> str:
    """The prompts of a workload, one after the other."""
    return "\n\n".join(item.prompt for item in items if isinstance(item.prompt, str))
