"""What the API process costs: the server is real, the engine process plays a device whose step takes a fixed time.

    python bench/bench_api.py                  # all measurements, beside their bounds; exit code 1 beyond one
    python bench/bench_api.py --only requests --json

requests: 16 in flight, each a chat of 300 prompt tokens and 20 to 60 of answer, not streamed. The overhead of a request
is how long the server had it (its audit log) less how long the engine had it (GET /v1/requests/ID/explain);
`client_overhead_ms` begins and ends in the client, with its own work. Its processor time is that of the API process
alone, whatever else the machine does.
stream: 16 chats streamed at 1,000 tokens a second together; the processor time of the API process over the time.
grpc: the same over gRPC.

The bounds are for a machine that does nothing else.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import httpx
import psutil

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.serving import MODEL_NAME, ServerProcess

IN_FLIGHT = 16
SHARE = "share_of_one_core_at_1000_tokens_per_s"
#: (what is measured, where it stands in the report, its bound, unit, factor).
BOUNDS = (
    ("API overhead a request, 16 in flight (median)", ("requests", "overhead_ms"), 3.0, "ms", 1),
    ("API processor share, 1,000 tokens/s streamed", ("stream", SHARE), 25.0, "% of a core", 100),
    ("the same over gRPC", ("grpc", SHARE), 25.0, "% of a core", 100),
)
WORDS = "the quick brown fox jumps over the lazy dog and runs away from all of them "


def chat(number: int, tokens: int, *, stream: bool) -> dict[str, Any]:
    messages = [{"role": "user", "content": f"{number}: {WORDS * 18}"}]  # some 300 tokens, no two alike
    body: dict[str, Any] = {
        "model": MODEL_NAME,
        "messages": messages,
        "max_tokens": tokens,
        "ignore_eos": True,
        "temperature": 0,
    }  # a device that plays need not draw
    return {**body, "stream": True, "stream_options": {"include_usage": True}} if stream else body


def server_for(step_s: float, log: Path, *more: str) -> ServerProcess:
    options = ["--max-model-len", "2048", "--num-blocks", "4096", "--max-num-batched-tokens", "8192"]
    options += ["--max-num-seqs", str(IN_FLIGHT), "--device-option", f"step_time_s={step_s}", "--no-log-requests"]
    options += ["--grpc-port", "0"]
    return ServerProcess(*options, *more, device="sim", log=log)


def cpu_seconds(server: ServerProcess) -> float:
    times = psutil.Process(server.process.pid).cpu_times()
    return float(times.user + times.system)


async def measure_requests(log: Path, count: int, step_s: float) -> dict[str, Any]:
    """Closed loop, 16 in flight."""
    audit = log.with_name("audit")
    with server_for(step_s, log, "--audit-log", str(audit)) as server:
        limits = httpx.Limits(max_connections=IN_FLIGHT, max_keepalive_connections=IN_FLIGHT)
        async with httpx.AsyncClient(base_url=server.url, timeout=120, limits=limits) as client:
            gate = asyncio.Semaphore(IN_FLIGHT)
            waited: dict[str, float] = {}

            async def one(number: int) -> None:
                async with gate:
                    begun = time.perf_counter()
                    reply = await client.post("/v1/chat/completions", json=chat(number, 20 + number % 41, stream=False))
                    waited[reply.headers["x-request-id"]] = time.perf_counter() - begun
                    assert reply.status_code == 200, reply.text

            await asyncio.gather(*(one(1000 + number) for number in range(IN_FLIGHT)))  # connections, caches
            waited.clear()
            cpu, begun = cpu_seconds(server), time.perf_counter()
            await asyncio.gather(*(one(number) for number in range(count)))
            wall_s, cpu_s = time.perf_counter() - begun, cpu_seconds(server) - cpu
            engine = {request_id: await engine_seconds(client, request_id) for request_id in waited}
    lines = [json.loads(line) for line in audit.read_text().splitlines()]
    served = {line["request_id"]: line["ms"] / 1000 for line in lines}
    overheads = [served[request_id] - seconds for request_id, seconds in engine.items()]
    return {
        "requests": count,
        "requests_per_s": count / wall_s,
        "latency_ms": 1000 * statistics.median(waited.values()),
        "overhead_ms": 1000 * statistics.median(overheads),
        "overhead_p90_ms": 1000 * statistics.quantiles(overheads, n=10)[-1],
        "client_overhead_ms": 1000 * statistics.median(waited[each] - seconds for each, seconds in engine.items()),
        "api_cpu_ms_per_request": 1000 * cpu_s / count,
    }


async def engine_seconds(client: httpx.AsyncClient, request_id: str) -> float:
    told = (await client.get(f"/v1/requests/{request_id}/explain")).json()
    (sequence,) = told["sequences"]
    return sum(float(sequence[part]["seconds"]) for part in ("queued", "prefill", "decode"))


async def measure_stream(log: Path, rate: float, seconds: float, *, rpc: bool) -> dict[str, Any]:
    """16 streams; steps take 16/rate, so that together they make `rate` tokens a second."""
    tokens = round(rate * seconds / IN_FLIGHT)
    with server_for(IN_FLIGHT / rate, log) as server:
        bodies = json.dumps([chat(number, tokens, stream=True) for number in range(IN_FLIGHT)])
        warm_up = json.dumps([chat(-1 - number, 8, stream=True) for number in range(IN_FLIGHT)])
        where = re.findall(r"gRPC at (\S+)", log.read_text())[0] if rpc else server.url
        for body in (warm_up, bodies):
            cpu, begun = cpu_seconds(server), time.perf_counter()
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-c",
                RPC_READER if rpc else READER,
                where,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
            )
            out, _ = await process.communicate(body.encode())
            wall_s, cpu_s = time.perf_counter() - begun, cpu_seconds(server) - cpu
        counted, begun, ended = json.loads(out)
    return {
        "tokens": counted,
        "tokens_per_s": counted / (ended - begun),
        "api_cpu_us_per_token": 1e6 * cpu_s / counted,
        SHARE: 1000 * cpu_s / counted,
        "wall_s": wall_s,
    }


#: Reads the streams in a process of its own, raw: a client that parses costs more than the server.
READER = r"""
import asyncio, json, re, sys, time
from urllib.parse import urlsplit
async def one(url, body):
    parts = urlsplit(url)
    reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
    data = json.dumps(body).encode()
    head = "POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
    head += f"content-length: {len(data)}\r\n\r\n"
    writer.write(head.encode() + data)
    kept = b""
    while b"[DONE]" not in kept[-200:]:
        piece = await reader.read(65536)
        assert piece, kept
        kept += piece
    writer.close()
    return int(re.findall(rb'"completion_tokens":(\d+)', kept)[-1])
async def main():
    begun = time.perf_counter()
    counts = await asyncio.gather(*(one(sys.argv[1], body) for body in json.load(sys.stdin)))
    print(json.dumps([sum(counts), begun, time.perf_counter()]))
asyncio.run(main())
"""


#: The same over gRPC.
RPC_READER = r"""
import asyncio, json, sys, time
import grpc
from enginecore.server.grpc import enginecore_pb2 as pb
from enginecore.server.grpc.enginecore_pb2_grpc import InferenceStub
async def one(stub, body):
    chat = pb.Chat(messages=[pb.Message(**message) for message in body["messages"]])
    sampling = pb.Sampling(max_tokens=body["max_tokens"], ignore_eos=True, temperature=0)
    async for news in stub.GenerateStream(pb.GenerateRequest(chat=chat, sampling=sampling)):
        last = news
    return last.usage.completion_tokens
async def main():
    async with grpc.aio.insecure_channel(sys.argv[1]) as channel:
        stub, begun = InferenceStub(channel), time.perf_counter()
        counts = await asyncio.gather(*(one(stub, body) for body in json.load(sys.stdin)))
        print(json.dumps([sum(counts), begun, time.perf_counter()]))
asyncio.run(main())
"""


def rows(report: dict[str, Any]) -> list[dict[str, Any]]:
    """What was measured beside its bound."""
    return [
        {"what": what, "value": factor * report[part][name], "bound": bound, "unit": unit,
         "met": factor * report[part][name] < bound}
        for what, (part, name), bound, unit, factor in BOUNDS if part in report
    ]  # fmt: skip


def show(report: dict[str, Any]) -> None:
    """The table, and the other figures under it."""
    print(f"{'measured':48}{'value':>8}{'bound':>8}")
    for row in report["bounds"]:
        verdict = "" if row["met"] else "  NOT MET"
        print(f"{row['what']:48}{row['value']:8.2f}{row['bound']:8.2f} {row['unit']}{verdict}")
    for part in ("requests", "stream", "grpc"):
        if part in report:
            print(f"{part}: " + ", ".join(f"{name} {value:.4g}" for name, value in report[part].items()))


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--only", choices=("requests", "stream", "grpc"))
    options.add_argument("--requests", type=int, default=320)
    options.add_argument("--step", type=float, default=0.005, help="seconds of a step while requests are measured")
    options.add_argument("--rate", type=float, default=1000.0, help="tokens a second of all streams together")
    options.add_argument("--seconds", type=float, default=8.0)
    options.add_argument("--json", action="store_true", help="print everything as JSON")
    args = options.parse_args()
    report: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder, "log")
        if args.only in (None, "requests"):
            report["requests"] = asyncio.run(measure_requests(log, args.requests, args.step))
        for part in ("stream", "grpc"):
            if args.only in (None, part):
                report[part] = asyncio.run(measure_stream(log, args.rate, args.seconds, rpc=part == "grpc"))
    report["bounds"] = rows(report)
    if args.json:
        print(json.dumps(report, indent=1))
    else:
        show(report)
    return 0 if all(row["met"] for row in report["bounds"]) else 1


if __name__ == "__main__":
    sys.exit(main())
