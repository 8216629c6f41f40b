"""Latency of one batch at a time."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from enginecore.cli.bench_report import medians, peak_rss_bytes, stamp
from enginecore.cli.bench_throughput import exact_length, settings_of
from enginecore.cli.bench_workload import WorkItem
from enginecore.cli.common import open_llm
from enginecore.config import EngineArgs
from enginecore.errors import ParameterError

if TYPE_CHECKING:
    from enginecore.frontend.llm import LLM
    from enginecore.frontend.outputs import RequestMetrics

MAX_BATCH = 4096


def parse_batch_sizes(text: str) -> list[int]:
    """[1, 4, 16] from "1,4,16"; ParameterError otherwise."""
    sizes = [
        int(part) for part in text.split(",") if part.strip().isascii() and part.strip().isdigit() and len(part) < 9
    ]
    if not sizes or len(sizes) != text.count(",") + 1 or not all(1 <= size <= MAX_BATCH for size in sizes):
        raise ParameterError(
            f"batch_sizes must be numbers from 1 to {MAX_BATCH} separated by commas, got {text!r}", param="batch_sizes"
        )
    return sizes


def measure_latency(
    engine: EngineArgs, items: Sequence[WorkItem], sizes: Sequence[int], input_len: int, output_len: int, repeat: int
) -> dict[str, Any]:
    """For each batch size the medians over `repeat` runs."""
    with open_llm(engine) as llm:
        prompts = _prompts(llm, items, max(sizes), input_len)
        llm.generate(prompts[:1], exact_length(2), use_tqdm=False)
        batches = {str(size): medians([_run(llm, prompts[:size], output_len) for _ in range(repeat)]) for size in sizes}
        return {
            "benchmark": "latency",
            "input_len": input_len,
            "output_len": output_len,
            "repeat": repeat,
            "batch": batches,
            "peak_rss_bytes": peak_rss_bytes(),
            "settings": settings_of(llm),
            **stamp(llm.fingerprint),
        }


def _prompts(llm: LLM, items: Sequence[WorkItem], count: int, length: int) -> list[list[int]]:
    """`count` prompts of exactly `length` tokens that begin differently: windows of the workload's text."""
    tokenizer = llm.get_tokenizer()
    stream: list[int] = []
    for item in items:
        stream += tokenizer.encode(item.prompt) if isinstance(item.prompt, str) else item.prompt
    if len(stream) < 2:
        raise ParameterError("the workload's text has less than two tokens", param="workload")
    looped = stream * (1 + (count + length) // len(stream)) + stream[: length % len(stream)]
    step = max(1, len(stream) // count)
    return [[looped[(index * step + offset) % len(looped)] for offset in range(length)] for index in range(count)]


def _run(llm: LLM, prompts: list[list[int]], output_len: int) -> dict[str, float]:
    llm.reset_prefix_cache()
    outputs = llm.generate(prompts, exact_length(output_len), use_tqdm=False)
    times = [output.metrics for output in outputs if output.metrics is not None]
    begun = min(one.arrival_time for one in times)
    first = max(_first(one) for one in times)
    ended = max(_finished(one) for one in times)
    return {
        "prefill_s": first - begun,
        "decode_s": ended - first,
        "ttft_ms": 1000 * statistics.fmean(_first(one) - one.arrival_time for one in times),
        "tpot_ms": 1000 * statistics.fmean((_finished(one) - _first(one)) / (output_len - 1) for one in times),
        "e2e_ms": 1000 * statistics.fmean(_finished(one) - one.arrival_time for one in times),
        "output_tok_per_s": len(prompts) * output_len / (ended - begun),
    }


def _first(metrics: RequestMetrics) -> float:
    assert metrics.first_token_time is not None
    return metrics.first_token_time


def _finished(metrics: RequestMetrics) -> float:
    assert metrics.finished_time is not None
    return metrics.finished_time
