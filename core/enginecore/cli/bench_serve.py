"""What the users of a server feel: streams over HTTP, closed loop or at Poisson times."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

from enginecore.cli import sse
from enginecore.cli.bench_client import Load, Target, new_client, probe, send
from enginecore.cli.bench_figures import MAX_ERRORS_SHOWN, NO_OBJECTIVES, TIMES, Objectives, figures, samples_of
from enginecore.cli.bench_progress import Begin, silent
from enginecore.cli.bench_report import aligned, medians, short, stamp
from enginecore.cli.bench_workload import WorkItem
from enginecore.cli.common import engine_argv
from enginecore.cli.local_server import LocalServer, local_server
from enginecore.config import EngineArgs
from enginecore.errors import EngineCoreError, ParameterError

MAX_CONCURRENCY = 100_000


@dataclass(frozen=True)
class Site:
    """The server to measure; without `url` one is started. `model` None asks for the first that it lists."""

    url: str | None = None
    api_key: str | None = None
    model: str | None = None


def parse_points(rates: str | None, concurrencies: str | None, load: Load) -> list[Load]:
    """The loads of a sweep, or just `load`. ParameterError when the lists are no numbers or both are given."""
    if rates is not None and concurrencies is not None:
        raise ParameterError("sweep_rate and sweep_concurrency exclude each other", param="sweep_rate")
    if rates is not None:
        return [Load(rate=rate, seed=load.seed) for rate in _numbers(rates, "sweep_rate", 0.001, 1e6)]
    if concurrencies is None:
        return [load]
    counts = _numbers(concurrencies, "sweep_concurrency", 1, MAX_CONCURRENCY)
    if any(count != int(count) for count in counts):
        raise ParameterError(
            f"sweep_concurrency must be whole numbers, got {concurrencies!r}", param="sweep_concurrency"
        )
    return [Load(concurrency=int(count), seed=load.seed) for count in counts]


def _numbers(text: str, param: str, least: float, most: float) -> list[float]:
    try:
        values = [float(part) for part in text.split(",")]
    except ValueError:
        values = []
    if not values or not all(least <= value <= most for value in values):
        raise ParameterError(
            f"{param} must be numbers from {least:g} to {most:g} separated by commas, got {text!r}", param=param
        )
    return values


def measure_serving(
    engine: EngineArgs,
    site: Site,
    points: Sequence[Load],
    items: Sequence[WorkItem],
    repeat: int,
    objectives: Objectives = NO_OBJECTIVES,
    begin: Begin = silent,
) -> dict[str, Any]:
    """Medians of `repeat` runs against the server of `site`, or one that is started for it. With several points the
    figures of each stand in `points`, else at the top. `samples` holds every time, by point."""
    given = LocalServer(sse.base_url(site.url), site.api_key or "", 0.0) if site.url else None
    with nullcontext(given) if given else local_server(engine) as server:
        target = asyncio.run(probe(server.url, server.api_key, site.model, items[0]))
        told = asyncio.run(_fingerprint(target))
        salted = repeat > 1 or len(points) > 1  # a later run must not find an earlier one's prefixes
        rows, samples = [], []
        for load in points:
            advance = begin(name_of(load), repeat * len(items))
            outcomes = [asyncio.run(send(target, load, items, salted=salted, advance=advance)) for _ in range(repeat)]
            rows.append(_row(load, [figures(*outcome, objectives) for outcome in outcomes]))
            samples.append(_pooled([samples_of(records) for records, _ in outcomes]))
    if len(points) == 1:
        report = {"benchmark": "serve", **rows[0]}
    else:
        report = {"benchmark": "serve", "sweep": "concurrency" if points[0].rate is None else "rate", "points": rows}
    report |= {"url": target.url, "model": target.model, "notes": list(target.notes), "samples": samples, **stamp(told)}
    if given is None:
        report["startup_s"] = server.startup_s
        report["settings"] = {"serve": engine_argv(engine)}
    return report


def name_of(load: Load) -> str:
    return f"{load.concurrency} in flight" if load.rate is None else f"{load.rate:g} requests/s"


def _row(load: Load, runs: list[dict[str, Any]]) -> dict[str, Any]:
    errors = sorted({error for run in runs for error in run.pop("errors")})[:MAX_ERRORS_SHOWN]
    if not any(run["num_requests"] - run["num_failed"] for run in runs):
        raise EngineCoreError("every request failed: " + "; ".join(errors))
    how: dict[str, Any] = {"concurrency": load.concurrency} if load.rate is None else {"rate": load.rate}
    return {**how, **medians(runs), "errors": errors, "runs": runs}


def _pooled(runs: Sequence[dict[str, list[float]]]) -> dict[str, list[float]]:
    return {name: [value for run in runs for value in run[name]] for name in TIMES}


async def _fingerprint(target: Target) -> dict[str, Any] | None:
    """The server's own; None from a server of another make."""
    async with new_client(target.api_key) as client:
        return await sse.get_object(client, f"{target.url}/v1/fingerprint")


def sweep_table(report: dict[str, Any]) -> list[str]:
    """A sweep for people: a row a point."""
    head = [report["sweep"], "output tok/s", "requests/s", "TTFT p50, ms", "TTFT p99", "TPOT p50", "ITL p99", "failed"]
    goodput = any("goodput" in point for point in report["points"])
    rows = [[*head, *(["goodput", "good/s"] if goodput else [])]]
    for point in report["points"]:
        values = [point["output_tok_per_s"], point["requests_per_s"]]
        for name, which in (("ttft_ms", "p50"), ("ttft_ms", "p99"), ("tpot_ms", "p50"), ("itl_ms", "p99")):
            values.append((point[name] or {}).get(which))
        row = [f"{point[report['sweep']]:g}", *(short(value) for value in values), str(point["num_failed"])]
        if goodput:
            row += [f"{point['goodput']['share']:.0%}", short(point["goodput"]["requests_per_s"])]
        rows.append(row)
    errors = sorted({error for point in report["points"] for error in point["errors"]})
    return [*aligned(rows), *report["notes"], *errors]
