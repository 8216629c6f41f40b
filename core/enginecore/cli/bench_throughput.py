"""Offline throughput: every request of a workload at once, through `LLM`."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import msgspec

from enginecore.cli.bench_report import medians, peak_rss_bytes, stamp
from enginecore.cli.bench_workload import WorkItem
from enginecore.cli.common import open_llm
from enginecore.config import EngineArgs
from enginecore.request import EngineStats, SamplingParams, StepOutputs

if TYPE_CHECKING:
    from enginecore.frontend.llm import LLM

WARM_UP_TOKENS = 8
#: Points of a run's progress in a report.
MAX_POINTS = 100


@dataclass
class StepTally:
    """Sums over the steps of a run, from the statistics that come with each."""

    slots_held: int = 0
    tokens_held: int = 0
    peak_running: int = 0
    last: EngineStats | None = None
    at_s: list[float] = field(default_factory=list)
    running: list[int] = field(default_factory=list)
    generated: list[int] = field(default_factory=list)

    def count(self, stats: EngineStats) -> None:
        self.slots_held += stats.kv_slots_held
        self.tokens_held += stats.kv_tokens_held
        self.peak_running = max(self.peak_running, stats.num_running)
        self.last = stats
        self.at_s.append(time.perf_counter())
        self.running.append(stats.num_running)
        self.generated.append(stats.generation_tokens)

    def progress(self) -> dict[str, list[float]]:
        """Speed and running requests over time, in up to `MAX_POINTS` pieces of the same number of steps."""
        if len(self.at_s) < 2:
            return {}
        last = len(self.at_s) - 1
        pieces = min(MAX_POINTS, last)
        edges = [round(piece * last / pieces) for piece in range(pieces + 1)]
        spans = list(pairwise(edges))
        return {
            "at_s": [self.at_s[end] - self.at_s[0] for _, end in spans],
            "running": [float(self.running[end]) for _, end in spans],
            "output_tok_per_s": [
                (self.generated[end] - self.generated[begin]) / max(1e-9, self.at_s[end] - self.at_s[begin])
                for begin, end in spans
            ],
        }

    @property
    def kv_waste(self) -> float | None:
        """Share of the KV slots held by running sequences that hold no token: the mean over steps, weighted by
        slots."""
        return 1 - self.tokens_held / self.slots_held if self.slots_held else None


class _Tallied:
    """An engine client whose steps are counted."""

    def __init__(self, client: Any, tally: StepTally) -> None:
        self._client = client
        self._tally = tally

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)

    def step(self) -> StepOutputs:
        outputs: StepOutputs = self._client.step()
        self._tally.count(outputs.stats)
        return outputs


@contextmanager
def tallied(llm: LLM, tally: StepTally) -> Iterator[None]:
    """Count the steps that `llm` takes inside the block."""
    client = llm._client
    llm._client = _Tallied(client, tally)  # type: ignore[assignment]
    try:
        yield
    finally:
        llm._client = client


def exact_length(output_tokens: int) -> SamplingParams:
    """Greedy, and exactly so many tokens: the same work for every engine."""
    return SamplingParams(temperature=0, max_tokens=output_tokens, ignore_eos=True)


def settings_of(llm: LLM) -> dict[str, Any]:
    """The resolved settings as plain data."""
    settings: dict[str, Any] = msgspec.to_builtins(llm.config)
    return settings


def measure_throughput(engine: EngineArgs, items: Sequence[WorkItem], repeat: int) -> dict[str, Any]:
    """Figures of `repeat` runs, each from an empty prefix cache, and their medians at the top level."""
    begun = time.perf_counter()
    with open_llm(engine) as llm:
        startup_s = time.perf_counter() - begun
        llm.generate([items[0].prompt], exact_length(WARM_UP_TOKENS), use_tqdm=False)
        tallies = [StepTally() for _ in range(repeat)]
        runs = [_run(llm, items, tally) for tally in tallies]
        return {
            "benchmark": "throughput",
            **medians(runs),
            "startup_s": startup_s,
            "peak_rss_bytes": peak_rss_bytes(),
            "progress": tallies[-1].progress(),
            "runs": runs,
            "settings": settings_of(llm),
            **stamp(llm.fingerprint),
        }


def _run(llm: LLM, items: Sequence[WorkItem], tally: StepTally) -> dict[str, Any]:
    llm.reset_prefix_cache()
    before: EngineStats = llm._client.call("stats")
    with tallied(llm, tally):
        begun = time.perf_counter()
        outputs = llm.generate(
            [item.prompt for item in items], [exact_length(item.output_tokens) for item in items], use_tqdm=False
        )
        wall_s = time.perf_counter() - begun
    after = tally.last or before
    input_tokens = sum(len(output.prompt_token_ids) for output in outputs)
    output_tokens = sum(output.num_generated_tokens for output in outputs)
    queries = after.prefix_cache_queries - before.prefix_cache_queries
    hits = after.prefix_cache_hits - before.prefix_cache_hits
    return {
        "num_requests": len(outputs),
        "wall_s": wall_s,
        "input_tokens": input_tokens,
        "output_tokens": output_tokens,
        "output_tok_per_s": output_tokens / wall_s,
        "total_tok_per_s": (input_tokens + output_tokens) / wall_s,
        "requests_per_s": len(outputs) / wall_s,
        "kv_waste": tally.kv_waste,
        "num_steps": after.num_steps - before.num_steps,
        "peak_running": tally.peak_running,
        "num_preemptions": after.num_preemptions - before.num_preemptions,
        "prefix_cache_hit_rate": hits / queries if queries else 0.0,
    }
