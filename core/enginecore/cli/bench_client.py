"""Load on an OpenAI-compatible server of any make: what it understands, and streams from it with the times of their
chunks."""

from __future__ import annotations

import asyncio
import random
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from typing import Any

import httpx

from enginecore.cli import sse
from enginecore.cli.bench_workload import WorkItem

#: Fields that not every make of server knows, least missed first, with what it means to go without.
OPTIONAL = {
    "cache_salt": "knows no cache_salt: later runs may find the prefixes of earlier ones",
    "stream_options": "refuses stream_options",
    "ignore_eos": "refuses ignore_eos: its answers may be shorter than asked for",
}
PROBE_TOKENS = 8


@dataclass(frozen=True)
class Load:
    """How to send requests: `rate` a second at Poisson times (open loop), else `concurrency` in flight (closed)."""

    concurrency: int = 16
    rate: float | None = None
    seed: int = 0


@dataclass(frozen=True)
class Target:
    """A server, the model to ask it for, the optional fields that it takes, and what was odd about it."""

    url: str
    api_key: str | None
    model: str
    fields: frozenset[str]
    notes: tuple[str, ...] = ()

    @property
    def address(self) -> str:
        return f"{self.url}/v1/completions"


@dataclass
class Record:
    """One request: what was asked, when it was sent, when each chunk with text came, what the server counted."""

    begun: float
    asked_tokens: int
    stamps: list[float] = field(default_factory=list)
    usage: dict[str, Any] = field(default_factory=dict)
    error: str | None = None

    @property
    def output_tokens(self) -> int:
        return int(self.usage.get("completion_tokens") or len(self.stamps))

    @property
    def ttft_s(self) -> float:
        return self.stamps[0] - self.begun

    @property
    def tpot_s(self) -> float | None:
        """None for an answer of one token, which has no second to wait for."""
        tokens = self.output_tokens
        return (self.stamps[-1] - self.stamps[0]) / (tokens - 1) if tokens > 1 else None


def new_client(api_key: str | None) -> httpx.AsyncClient:
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    return httpx.AsyncClient(timeout=None, limits=limits, headers=sse.headers_for(api_key))


async def probe(url: str, api_key: str | None, model: str | None, item: WorkItem) -> Target:
    """Ask for a few tokens: with every field, then without one or more of the optional ones while the server refuses.

    Raises ServerReplyError when it refuses the plainest request too, with what it said to the fullest.
    """
    async with new_client(api_key) as client:
        name = model or await sse.first_model(client, url)
        short, refusal = unlike(WorkItem(item.prompt, PROBE_TOKENS)), None
        for count in range(len(OPTIONAL) + 1):
            for dropped in combinations(OPTIONAL, count):
                target = Target(url, api_key, name, frozenset(OPTIONAL) - frozenset(dropped))
                record = await one(client, target, short, cache_salt="probe")
                if record.error is None:
                    notes = [*(OPTIONAL[each] for each in dropped), *_oddities(record)]
                    return Target(url, api_key, name, target.fields, tuple(notes))
                refusal = refusal or record.error
                if not record.error.startswith(("the server answered 400", "the server answered 422")):
                    raise sse.ServerReplyError(record.error)
        raise sse.ServerReplyError(refusal or "")


def unlike(item: WorkItem) -> WorkItem:
    """The same work with a prompt that begins like none before: a few characters in front of a text, and token ids
    rotated, which keeps their number."""
    if isinstance(item.prompt, str):
        return WorkItem(f"{secrets.token_hex(4)} {item.prompt}", item.output_tokens)
    turn = secrets.randbelow(len(item.prompt))
    return WorkItem(item.prompt[turn:] + item.prompt[:turn], item.output_tokens)


def _oddities(record: Record) -> list[str]:
    if not record.usage.get("completion_tokens"):
        return ["counts no tokens in its streams: chunks are counted instead"]
    if record.output_tokens < record.asked_tokens:
        return [f"stopped after {record.output_tokens} of {record.asked_tokens} tokens in spite of ignore_eos"]
    return []


async def send(
    target: Target,
    load: Load,
    items: Sequence[WorkItem],
    *,
    salted: bool = False,
    advance: Callable[[], object] = lambda: None,
) -> tuple[list[Record], float]:
    """Every item under `load`: records in the order of the items, and the seconds that it all took. `salted`: nothing
    that the server keeps of this run is of use to another. `advance` is called as each request ends."""
    salt = secrets.token_hex(8) if salted else None
    async with new_client(target.api_key) as client:
        warm_up = await one(client, target, WorkItem("warm up", 4), cache_salt=salt)
        if warm_up.error:
            raise sse.ServerReplyError(warm_up.error)

        async def ask(item: WorkItem) -> Record:
            record = await one(client, target, item, cache_salt=salt)
            advance()
            return record

        begun = time.perf_counter()
        if load.rate is None:
            records = await _closed_loop(ask, items, load.concurrency)
        else:
            records = await _open_loop(ask, items, load.rate, load.seed)
        return records, time.perf_counter() - begun


async def _closed_loop(ask: Callable[[WorkItem], Any], items: Sequence[WorkItem], concurrency: int) -> list[Record]:
    gate = asyncio.Semaphore(concurrency)

    async def gated(item: WorkItem) -> Record:
        async with gate:
            record: Record = await ask(item)
            return record

    return await asyncio.gather(*(gated(item) for item in items))


async def _open_loop(ask: Callable[[WorkItem], Any], items: Sequence[WorkItem], rate: float, seed: int) -> list[Record]:
    """Each request at its own time from the start, so that a late one does not delay those after it."""
    times, at, begun, jobs = random.Random(seed), 0.0, time.perf_counter(), []
    for item in items:
        await asyncio.sleep(max(0.0, begun + at - time.perf_counter()))
        jobs.append(asyncio.create_task(ask(item)))
        at += times.expovariate(rate)
    return list(await asyncio.gather(*jobs))


async def one(client: httpx.AsyncClient, target: Target, item: WorkItem, *, cache_salt: str | None) -> Record:
    """One streamed answer, greedy. A failure is in the record."""
    optional: dict[str, Any] = {"ignore_eos": True, "stream_options": {"include_usage": True}}
    if cache_salt is not None:
        optional["cache_salt"] = cache_salt
    body = {
        "model": target.model,
        "prompt": item.prompt,
        "max_tokens": item.output_tokens,
        "temperature": 0,
        "stream": True,
        **{name: value for name, value in optional.items() if name in target.fields},
    }
    record = Record(time.perf_counter(), item.output_tokens)
    try:
        async for event in sse.stream(client, target.address, body):
            record.usage = event.get("usage") or record.usage
            if _has_text(event.get("choices")):
                record.stamps.append(time.perf_counter())
    except sse.ServerReplyError as error:
        record.error = error.message
    else:
        record.error = None if record.stamps else "the stream held no tokens"
    return record


def _has_text(choices: Any) -> bool:
    """Whether a chunk brings something: those that only say why a stream ends are no tokens."""
    return bool(choices) and bool(choices[0].get("text") or choices[0].get("finish_reason") is None)
