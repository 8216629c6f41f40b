"""Figures of a run over HTTP, from the records of its requests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from enginecore.cli.bench_client import Record
from enginecore.cli.bench_report import percentiles

MAX_ERRORS_SHOWN = 5
TIMES = ("ttft_ms", "tpot_ms", "itl_ms", "e2e_ms")


@dataclass(frozen=True)
class Objectives:
    """What a request must keep to count as good: milliseconds to the first token and for each one after it."""

    ttft_ms: float | None = None
    tpot_ms: float | None = None

    def __bool__(self) -> bool:
        return self.ttft_ms is not None or self.tpot_ms is not None

    def met_by(self, record: Record) -> bool:
        """A failed request meets nothing; an answer of one token has no time per output token to miss."""
        if record.error is not None:
            return False
        tpot = record.tpot_s
        return (self.ttft_ms is None or 1000 * record.ttft_s <= self.ttft_ms) and (
            self.tpot_ms is None or tpot is None or 1000 * tpot <= self.tpot_ms
        )


NO_OBJECTIVES = Objectives()


def samples_of(records: Sequence[Record]) -> dict[str, list[float]]:
    """Every time in milliseconds: to the first token, per output token, between chunks, and of whole answers."""
    good = [record for record in records if record.error is None]
    seconds: dict[str, list[float]] = {
        "ttft_ms": [record.ttft_s for record in good],
        "tpot_ms": [tpot for record in good if (tpot := record.tpot_s) is not None],
        "itl_ms": [b - a for record in good for a, b in zip(record.stamps, record.stamps[1:], strict=False)],
        "e2e_ms": [record.stamps[-1] - record.begun for record in good],
    }
    return {name: [1000 * value for value in values] for name, values in seconds.items()}


def figures(records: Sequence[Record], wall_s: float, objectives: Objectives = Objectives()) -> dict[str, Any]:
    """Counts, rates, percentiles of every time and, with objectives, goodput. `num_short` answers ended early;
    `tokens_per_chunk` above 1 means that the gaps between chunks (ITL) are not gaps between tokens."""
    good = [record for record in records if record.error is None]
    output_tokens = sum(record.output_tokens for record in good)
    input_tokens = sum(int(record.usage.get("prompt_tokens") or 0) for record in good)
    chunks = sum(len(record.stamps) for record in good)
    result: dict[str, Any] = {
        "num_requests": len(records),
        "num_failed": len(records) - len(good),
        "num_short": sum(record.output_tokens < record.asked_tokens for record in good),
        "wall_s": wall_s,
        "input_tokens": input_tokens,
        "output_tokens": output_tokens,
        "tokens_per_chunk": output_tokens / chunks if chunks else None,
        "output_tok_per_s": output_tokens / wall_s,
        "total_tok_per_s": (input_tokens + output_tokens) / wall_s,
        "requests_per_s": len(good) / wall_s,
        **{name: percentiles(values) for name, values in samples_of(records).items()},
        "errors": sorted({record.error for record in records if record.error})[:MAX_ERRORS_SHOWN],
    }
    if objectives:
        met = sum(objectives.met_by(record) for record in records)
        goodput: dict[str, float | None] = {
            "ttft_slo_ms": objectives.ttft_ms,
            "tpot_slo_ms": objectives.tpot_ms,
            "share": met / len(records),
            "requests_per_s": met / wall_s,
        }
        result["goodput"] = goodput
    return result
