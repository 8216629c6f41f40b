"""Servers beside each other: the same requests to each, taking turns, because machines change while one measures."""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

from enginecore.cli import sse
from enginecore.cli.bench_client import Load, Target, new_client, probe, send, unlike
from enginecore.cli.bench_figures import MAX_ERRORS_SHOWN, NO_OBJECTIVES, TIMES, Objectives, figures, samples_of
from enginecore.cli.bench_progress import Begin, silent
from enginecore.cli.bench_report import aligned, medians, short, stamp
from enginecore.cli.bench_workload import WorkItem
from enginecore.cli.common import engine_argv
from enginecore.cli.local_server import LocalServer, local_server
from enginecore.config import EngineArgs
from enginecore.errors import EngineCoreError, ParameterError

OURS = "enginecore"
#: What is compared, with what people call it; the best value is the largest of the first kind, the smallest of the
#: second.
RATES = {"output_tok_per_s": "output tok/s"}
LATENCIES = {
    "ttft_ms.p50": "TTFT p50, ms",
    "ttft_ms.p99": "TTFT p99, ms",
    "tpot_ms.p50": "TPOT p50, ms",
    "itl_ms.p99": "ITL p99, ms",
}
FIGURES = {**RATES, **LATENCIES}
#: Several tokens in a chunk on average: from here on the gaps between chunks are worth a word.
MANY_IN_A_CHUNK = 1.2


@dataclass(frozen=True)
class Contest:
    """`theirs` are the other servers as (name, address). `ours` is our server's address; None starts one."""

    theirs: Sequence[tuple[str, str]]
    load: Load
    rounds: int
    objectives: Objectives = NO_OBJECTIVES
    ours: str | None = None
    api_key: str | None = None
    their_key: str | None = None
    their_model: str | None = None


def parse_servers(texts: Sequence[str]) -> list[tuple[str, str]]:
    """(name, address) of each URL or NAME=URL; a name that is missing is the URL's host and port. ParameterError for
    what is no URL, for no server at all and for a name twice."""
    servers = []
    for text in texts:
        name, equals, url = text.partition("=") if "=" in text.partition("://")[0] else ("", "", text)
        if not url.startswith(("http://", "https://")) or len(url.partition("://")[2]) == 0 or (equals and not name):
            raise ParameterError(
                f"urls must be like http://127.0.0.1:8001 or NAME=http://127.0.0.1:8001, got {text!r}", param="urls"
            )
        url = sse.base_url(url)
        servers.append((name or url.partition("://")[2], url))
    names = [OURS, *(name for name, _ in servers)]
    if not servers:
        raise ParameterError("compare needs the URL of at least one other server", param="urls")
    for name in names:
        if names.count(name) > 1:
            raise ParameterError(f"urls: {name} stands there twice; tell them apart as NAME=URL", param="urls")
    return servers


def measure_comparison(
    engine: EngineArgs, contest: Contest, items: Sequence[WorkItem], begin: Begin = silent
) -> dict[str, Any]:
    """Medians of `rounds` runs of every server, and for each other server the medians of the ratios ours / theirs
    within a round. `samples` holds every time of every server.

    The prompts of a round are the same for all servers and begin like no other prompt, so that no cache of prefixes,
    of whatever make, has a part in it.
    """
    given = LocalServer(sse.base_url(contest.ours), contest.api_key or "", 0.0) if contest.ours else None
    with nullcontext(given) if given else local_server(engine) as server:
        asked: list[tuple[str, str, str | None, str | None]] = [(OURS, server.url, server.api_key, None)]
        asked += [(name, url, contest.their_key, contest.their_model) for name, url in contest.theirs]
        targets = {name: asyncio.run(_probe(name, url, key, model, items[0])) for name, url, key, model in asked}
        told = asyncio.run(_fingerprint(targets[OURS]))
        runs: dict[str, list[dict[str, Any]]] = {name: [] for name in targets}
        samples: dict[str, dict[str, list[float]]] = {name: {key: [] for key in TIMES} for name in targets}
        advance = begin("rounds", contest.rounds * len(targets) * len(items))
        for number in range(contest.rounds):
            batch = [unlike(item) for item in items]
            order = list(targets)
            for name in order[number % len(order) :] + order[: number % len(order)]:
                records, wall_s = asyncio.run(send(targets[name], contest.load, batch, advance=advance))
                runs[name].append(figures(records, wall_s, contest.objectives))
                for key, values in samples_of(records).items():
                    samples[name][key] += values
    settings = {} if given else {"settings": {"serve": engine_argv(engine)}, "startup_s": server.startup_s}
    return {**_report(contest, targets, runs), "samples": samples, **settings, **stamp(told)}


async def _probe(name: str, url: str, key: str | None, model: str | None, item: WorkItem) -> Target:
    try:
        return await probe(url, key, model, item)
    except sse.ServerReplyError as error:
        raise sse.ServerReplyError(f"{name} ({url}): {error.message}", fix=error.fix) from error


async def _fingerprint(target: Target) -> dict[str, Any] | None:
    async with new_client(target.api_key) as client:
        return await sse.get_object(client, f"{target.url}/v1/fingerprint")


def _report(contest: Contest, targets: dict[str, Target], runs: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    servers: dict[str, Any] = {}
    for name, target in targets.items():
        errors = sorted({error for run in runs[name] for error in run.pop("errors")})[:MAX_ERRORS_SHOWN]
        if all(run["num_requests"] == run["num_failed"] for run in runs[name]):
            raise EngineCoreError(f"{name}: every request failed: {'; '.join(errors)}")
        middle = medians(runs[name])
        notes = [*target.notes, *_notes(middle)]
        facts = {"url": target.url, "model": target.model, "errors": errors, "notes": notes, "runs": runs[name]}
        servers[name] = {**middle, **facts}
    return {
        "benchmark": "compare",
        "rounds": contest.rounds,
        "concurrency": contest.load.concurrency if contest.load.rate is None else None,
        "rate": contest.load.rate,
        "servers": servers,
        "ratios": {name: _ratios(runs[OURS], runs[name]) for name in targets if name != OURS},
    }


def _notes(middle: dict[str, Any]) -> list[str]:
    notes = []
    if middle["num_failed"]:
        notes.append(f"{middle['num_failed']} of {middle['num_requests']} requests failed")
    if middle["num_short"]:
        notes.append(f"{middle['num_short']} of {middle['num_requests']} answers were shorter than asked for")
    if (middle["tokens_per_chunk"] or 0) > MANY_IN_A_CHUNK:
        notes.append(f"sends {middle['tokens_per_chunk']:.1f} tokens in a chunk: its ITL is between chunks")
    return notes


def _ratios(ours: Sequence[dict[str, Any]], theirs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Of each figure ours / theirs: the median over rounds, the least and the most. None where one has no figure."""
    ratios: dict[str, Any] = {}
    for key in FIGURES:
        pairs = [(value_of(a, key), value_of(b, key)) for a, b in zip(ours, theirs, strict=True)]
        values = [a / b for a, b in pairs if a is not None and b]
        if values:
            ratios[key] = {"median": statistics.median(values), "min": min(values), "max": max(values)}
        else:
            ratios[key] = None
    return ratios


def value_of(figures_of_a_run: dict[str, Any], key: str) -> float | None:
    """The figure at a key such as "ttft_ms.p50"."""
    value: Any = figures_of_a_run
    for part in key.split("."):
        value = value.get(part) if isinstance(value, dict) else None
    return None if value is None else float(value)


def comparison_table(report: dict[str, Any]) -> list[str]:
    """Lines for people: figures of every server, ratios, and what to know about them."""
    servers = report["servers"]
    goodput = any("goodput" in one for one in servers.values())
    columns = {**FIGURES, **({"goodput.share": "goodput"} if goodput else {})}
    rows = [["", *columns.values()]]
    rows += [[name, *(short(value_of(one, key)) for key in columns)] for name, one in servers.items()]
    for name, ratios in report["ratios"].items():
        rows.append([f"ours / {name}", *(_ratio(ratios.get(key)) for key in columns)])
    lines = aligned(rows)
    lines.append("")
    lines.append(
        f"Medians of {report['rounds']} rounds; ratios are medians of ratios within a round. Better: above 1 for "
        "rates, below 1 for times."
    )
    for name, one in servers.items():
        lines += [f"{name}: {note}" for note in [*one["notes"], *one["errors"]]]
    return lines


def _ratio(value: dict[str, float] | None) -> str:
    return f"{value['median']:.2f}x" if value else "-"
