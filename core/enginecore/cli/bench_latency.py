"""Latency of one batch at a time."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import msgspec

from enginecore.cli.bench_progress import Begin, silent
from enginecore.cli.bench_report import aligned, medians, peak_rss_bytes, short, stamp
from enginecore.cli.bench_throughput import StepTally, exact_length, settings_of, tallied
from enginecore.cli.bench_workload import WorkItem
from enginecore.cli.common import open_llm
from enginecore.config import EngineArgs
from enginecore.errors import ParameterError

if TYPE_CHECKING:
    from enginecore.frontend.llm import LLM
    from enginecore.frontend.outputs import RequestMetrics

MAX_BATCH = 4096
MAX_CONTEXT = 10_000_000
MAX_THREADS = 1024


def parse_batch_sizes(text: str) -> list[int]:
    """[1, 4, 16] from "1,4,16"; ParameterError otherwise."""
    return parse_counts(text, "batch_sizes", MAX_BATCH)


def parse_counts(text: str, param: str, most: int) -> list[int]:
    """Whole numbers from 1 to `most`, separated by commas; ParameterError that names `param` otherwise."""
    sizes = [
        int(part) for part in text.split(",") if part.strip().isascii() and part.strip().isdigit() and len(part) < 9
    ]
    if not sizes or len(sizes) != text.count(",") + 1 or not all(1 <= size <= most for size in sizes):
        raise ParameterError(f"{param} must be numbers from 1 to {most} separated by commas, got {text!r}", param=param)
    return sizes


@dataclass(frozen=True)
class Growth:
    """What to measure: every batch size at the first context, every context at the first batch size, and all that with
    each number of threads (None: as the engine's settings say)."""

    sizes: Sequence[int]
    contexts: Sequence[int]
    threads: Sequence[int | None] = (None,)

    def points(self) -> list[tuple[int, int]]:
        """(batch size, context) without repetition."""
        pairs = [(size, self.contexts[0]) for size in self.sizes] + [(self.sizes[0], one) for one in self.contexts]
        return list(dict.fromkeys(pairs))

    @property
    def is_plain(self) -> bool:
        """Batch sizes only."""
        return len(self.contexts) == 1 and len(self.threads) == 1


def measure_latency(
    engine: EngineArgs, items: Sequence[WorkItem], growth: Growth, output_len: int, repeat: int, begin: Begin = silent
) -> dict[str, Any]:
    """For each point the medians over `repeat` runs: under `batch` by size, or as rows under `curves` when contexts or
    threads change too. Points that the KV cache cannot hold at once are left out, with a note."""
    rows: list[dict[str, Any]] = []
    notes: list[str] = []
    facts: dict[str, Any] = {}
    for threads in growth.threads:
        with open_llm(engine if threads is None else msgspec.structs.replace(engine, num_threads=threads)) as llm:
            rows += _rows(llm, items, growth.points(), output_len, repeat, threads, notes, begin)
            facts = facts or {"settings": settings_of(llm), **stamp(llm.fingerprint)}
    report: dict[str, Any] = {"benchmark": "latency"}
    if growth.is_plain:
        report |= {"input_len": growth.contexts[0], "output_len": output_len, "repeat": repeat}
        report["batch"] = {str(row.pop("batch")): _without(row, "threads", "context") for row in rows}
    else:
        report |= {"output_len": output_len, "repeat": repeat, "curves": rows}
    return {**report, "notes": list(dict.fromkeys(notes)), "peak_rss_bytes": peak_rss_bytes(), **facts}


def _without(row: dict[str, Any], *keys: str) -> dict[str, Any]:
    return {key: value for key, value in row.items() if key not in keys}


def _rows(
    llm: LLM,
    items: Sequence[WorkItem],
    points: Sequence[tuple[int, int]],
    output_len: int,
    repeat: int,
    threads: int | None,
    notes: list[str],
    begin: Begin,
) -> list[dict[str, Any]]:
    config = llm.config
    longest = max(context for _, context in points)
    if longest + output_len > config.max_model_len:
        raise ParameterError(
            f"a context of {longest} tokens and {output_len} output tokens are more than max_model_len "
            f"{config.max_model_len}",
            param="contexts",
            fix="ask for shorter contexts, or raise --max-model-len",
        )
    slots, rows = config.num_blocks * config.block_size, []
    llm.generate(_prompts(llm, items, 1, points[0][1]), exact_length(2), use_tqdm=False)
    named = "" if threads is None else f"{threads} threads: "
    for size, context in points:
        if size > 1 and size * (context + output_len) > slots:
            notes.append(f"{size} sequences of {context} tokens do not fit the KV cache of {slots} tokens: left out")
            continue
        prompts = _prompts(llm, items, size, context)
        advance = begin(f"{named}batch {size}, context {context}", repeat)
        runs = []
        for _ in range(repeat):
            runs.append(_run(llm, prompts, output_len))
            advance()
        rows.append({"threads": threads, "context": context, "batch": size, **medians(runs)})
    return rows


def growth_table(report: dict[str, Any]) -> list[str]:
    """Curves for people: a row a point."""
    names = {
        "threads": "threads",
        "context": "context",
        "batch": "batch",
        "prefill_s": "prefill, s",
        "ttft_ms": "TTFT, ms",
        "decode_step_ms": "decode step, ms",
        "output_tok_per_s": "output tok/s",
    }
    rows = [list(names.values())]
    rows += [
        [short(value) if isinstance(value, float) else str(value or "-") for value in map(point.get, names)]
        for point in report["curves"]
    ]
    return [*aligned(rows), *report["notes"]]


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


def _run(llm: LLM, prompts: list[list[int]], output_len: int) -> dict[str, float | None]:
    """`decode_step_ms` is the median of the steps that brought a token to every sequence, so that prompts of large
    batches, which come in pieces between them, are not in it; None where there was none."""
    llm.reset_prefix_cache()
    tally = StepTally()
    with tallied(llm, tally):
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
        "decode_step_ms": _full_step_ms(tally, len(prompts)),
        "output_tok_per_s": len(prompts) * output_len / (ended - begun),
    }


def _full_step_ms(tally: StepTally, size: int) -> float | None:
    steps = zip(pairwise(tally.at_s), pairwise(tally.generated), strict=True)
    times = [1000 * (end - start) for (start, end), (before, after) in steps if after - before == size]
    return statistics.median(times) if times else None


def _first(metrics: RequestMetrics) -> float:
    assert metrics.first_token_time is not None
    return metrics.first_token_time


def _finished(metrics: RequestMetrics) -> float:
    assert metrics.finished_time is not None
    return metrics.finished_time
