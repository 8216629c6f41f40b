"""What the users of a server feel: streams over HTTP, closed loop or at Poisson times."""

from __future__ import annotations

import asyncio
import random
import secrets
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import httpx

from enginecore.cli import sse
from enginecore.cli.bench_report import medians, percentiles, stamp
from enginecore.cli.bench_workload import WorkItem
from enginecore.cli.common import engine_argv
from enginecore.cli.local_server import LocalServer, local_server
from enginecore.config import EngineArgs
from enginecore.errors import EngineCoreError

MAX_ERRORS_SHOWN = 5


@dataclass(frozen=True)
class Load:
    """Where to send requests and how: `rate` a second (open loop), else `concurrency` in flight (closed loop)."""

    url: str | None = None
    api_key: str | None = None
    model: str | None = None
    concurrency: int = 16
    rate: float | None = None
    seed: int = 0


@dataclass
class Record:
    """One request: when it was sent, when each chunk with text came, what the server counted."""

    begun: float
    stamps: list[float] = field(default_factory=list)
    usage: dict[str, Any] = field(default_factory=dict)
    error: str | None = None

    @property
    def output_tokens(self) -> int:
        return int(self.usage.get("completion_tokens") or len(self.stamps))


def measure_serving(engine: EngineArgs, load: Load, items: Sequence[WorkItem], repeat: int) -> dict[str, Any]:
    """Medians of `repeat` runs against the server of `load`, or one that is started for it."""
    given = LocalServer(sse.base_url(load.url), load.api_key or "", 0.0) if load.url else None
    with nullcontext(given) if given else local_server(engine) as server:
        told = asyncio.run(_fingerprint(server))
        runs = [asyncio.run(_run(server, load, items, fresh=repeat > 1)) for _ in range(repeat)]
    errors = sorted({error for run in runs for error in run.pop("errors")})[:MAX_ERRORS_SHOWN]
    if not any(run["num_requests"] - run["num_failed"] for run in runs):
        raise EngineCoreError("every request failed: " + "; ".join(errors))
    report = {"benchmark": "serve", **medians(runs), "errors": errors, "runs": runs, **stamp(told)}
    if given is None:
        report["startup_s"] = server.startup_s
        report["settings"] = {"serve": engine_argv(engine)}
    return report


async def _fingerprint(server: LocalServer) -> dict[str, Any] | None:
    """The server's own; None from a server of another make."""
    async with httpx.AsyncClient(timeout=60, headers=sse.headers_for(server.api_key)) as client:
        return await sse.get_object(client, f"{server.url}/v1/fingerprint")


async def _run(server: LocalServer, load: Load, items: Sequence[WorkItem], *, fresh: bool) -> dict[str, Any]:
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    client = httpx.AsyncClient(timeout=None, limits=limits, headers=sse.headers_for(server.api_key))
    async with client:
        shared: dict[str, Any] = {"model": load.model or await sse.first_model(client, server.url)}
        if fresh:
            shared["cache_salt"] = secrets.token_hex(8)  # a later run must not find an earlier one's prefixes
        address = f"{server.url}/v1/completions"
        warm_up = await _one(client, address, shared, WorkItem("warm up", 4))
        if warm_up.error:
            raise sse.ServerReplyError(warm_up.error)
        begun = time.perf_counter()
        if load.rate is None:
            records = await _closed_loop(client, address, shared, items, load.concurrency)
        else:
            records = await _open_loop(client, address, shared, items, load.rate, load.seed)
        return _figures(records, time.perf_counter() - begun)


async def _closed_loop(
    client: httpx.AsyncClient, address: str, shared: dict[str, Any], items: Sequence[WorkItem], concurrency: int
) -> list[Record]:
    gate = asyncio.Semaphore(concurrency)

    async def gated(item: WorkItem) -> Record:
        async with gate:
            return await _one(client, address, shared, item)

    return await asyncio.gather(*(gated(item) for item in items))


async def _open_loop(
    client: httpx.AsyncClient, address: str, shared: dict[str, Any], items: Sequence[WorkItem], rate: float, seed: int
) -> list[Record]:
    times, jobs = random.Random(seed), []
    for item in items:
        jobs.append(asyncio.create_task(_one(client, address, shared, item)))
        await asyncio.sleep(times.expovariate(rate))
    return await asyncio.gather(*jobs)


async def _one(client: httpx.AsyncClient, address: str, shared: dict[str, Any], item: WorkItem) -> Record:
    body = {
        **shared,
        "prompt": item.prompt,
        "max_tokens": item.output_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    record = Record(begun=time.perf_counter())
    try:
        async for event in sse.stream(client, address, body):
            record.usage = event.get("usage") or record.usage
            if event.get("choices"):
                record.stamps.append(time.perf_counter())
    except sse.ServerReplyError as error:
        record.error = error.message
    else:
        record.error = None if record.stamps else "the stream held no tokens"
    return record


def _figures(records: Sequence[Record], wall_s: float) -> dict[str, Any]:
    good = [record for record in records if record.error is None]
    output_tokens = sum(record.output_tokens for record in good)
    input_tokens = sum(int(record.usage.get("prompt_tokens") or 0) for record in good)
    times: dict[str, list[float]] = {
        "ttft_ms": [record.stamps[0] - record.begun for record in good],
        "tpot_ms": [
            (record.stamps[-1] - record.stamps[0]) / (record.output_tokens - 1)
            for record in good
            if record.output_tokens > 1
        ],
        "itl_ms": [b - a for record in good for a, b in zip(record.stamps, record.stamps[1:], strict=False)],
        "e2e_ms": [record.stamps[-1] - record.begun for record in good],
    }
    return {
        "num_requests": len(records),
        "num_failed": len(records) - len(good),
        "wall_s": wall_s,
        "input_tokens": input_tokens,
        "output_tokens": output_tokens,
        "output_tok_per_s": output_tokens / wall_s,
        "total_tok_per_s": (input_tokens + output_tokens) / wall_s,
        "requests_per_s": len(good) / wall_s,
        **{name: percentiles([1000 * value for value in values]) for name, values in times.items()},
        "errors": sorted({record.error for record in records if record.error})[:MAX_ERRORS_SHOWN],
    }
