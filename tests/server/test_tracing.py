"""Spans: one a request, with the field's names, below the caller's own."""

from __future__ import annotations

import asyncio
import http.server
import subprocess
import sys
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from enginecore.errors import ParameterError
from enginecore.server.args import ServerArgs
from enginecore.server.grpc import enginecore_pb2 as pb
from enginecore.server.tracing import Tracer, make_tracer
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from tests.server.asgi import Exchange
from tests.server.fake_engine import saying
from tests.server.fake_pooling import pooling_server
from tests.server.grpc.wire import Wire, wired

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
CHAT = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 8}


@asynccontextmanager
async def traced(**options: Any) -> AsyncIterator[tuple[Wire, InMemorySpanExporter]]:
    found = InMemorySpanExporter()
    async with wired(saying("hello"), served_model_name="toy", **options) as wire:
        wire.http.app.gate.tracer = Tracer("toy", SimpleSpanProcessor(found))
        yield wire, found


def only(found: InMemorySpanExporter) -> tuple[Any, dict[str, Any]]:
    (span,) = found.get_finished_spans()
    found.clear()
    return span, dict(span.attributes or {})


async def test_a_chat_and_what_is_told_of_it() -> None:
    async with traced() as (wire, found):
        wire.http.engine.cached = 3
        body = {**CHAT, "temperature": 0.5, "seed": 7, "n": 2, "stop": ["zz"], "top_k": 4}
        headers = {"traceparent": f"00-{TRACE}-{PARENT}-01", "tracestate": "a=b", "x-request-id": "mine"}
        assert (await wire.http.http.post("/v1/chat/completions", json=body, headers=headers)).status_code == 200
        span, told = only(found)
        assert (span.name, span.kind, span.status.status_code) == ("chat toy", SpanKind.SERVER, StatusCode.UNSET)
        assert format(span.context.trace_id, "032x") == TRACE and format(span.parent.span_id, "016x") == PARENT
        assert span.context.trace_state["a"] == "b" and told.pop("gen_ai.latency.time_to_first_token") > 0
        assert told == {
            "enginecore.request.id": "mine", "http.request.method": "POST", "http.response.status_code": 200,
            "http.route": "/v1/chat/completions", "url.path": "/v1/chat/completions",
            "gen_ai.operation.name": "chat", "gen_ai.provider.name": "enginecore",
            "gen_ai.request.model": "toy", "gen_ai.response.model": "toy", "gen_ai.request.max_tokens": 8,
            "gen_ai.request.temperature": 0.5, "gen_ai.request.top_p": 1.0, "gen_ai.request.top_k": 4,
            "gen_ai.request.seed": 7, "gen_ai.request.choice.count": 2, "gen_ai.request.stop_sequences": ("zz",),
            "gen_ai.response.finish_reasons": ("stop", "stop"), "gen_ai.usage.input_tokens": span.attributes[
                "gen_ai.usage.input_tokens"], "gen_ai.usage.output_tokens": 4,
            "gen_ai.usage.cache_read.input_tokens": 3,
        }  # fmt: skip
        assert told["gen_ai.usage.input_tokens"] > 5


async def test_one_for_each_request_of_every_route_and_of_grpc() -> None:
    async with traced() as (wire, found):
        for path, body, name in (
            ("/v1/completions", {"prompt": "x", "stream": True}, "text_completion toy"),
            ("/v1/messages", {"model": "toy", **CHAT, "stream": True}, "chat toy"),
            ("/v1/responses", {"input": "x"}, "chat toy"),
            ("/tokenize", {"prompt": "x"}, "POST /tokenize"),
        ):
            assert (await wire.http.http.post(path, json=body)).status_code == 200
            span, told = only(found)
            assert span.name == name and span.parent is None and told["http.response.status_code"] == 200
            assert ("gen_ai.response.finish_reasons" in told) == (path != "/tokenize")
        await wire.http.http.get("/v1/models")
        assert not found.get_finished_spans(), "looking is not traced"
        metadata = (("traceparent", f"00-{TRACE}-{PARENT}-01"),)
        await wire.stub.Generate(pb.GenerateRequest(text="x"), metadata=metadata)
        span, told = only(found)
        assert span.name == "text_completion toy" and format(span.context.trace_id, "032x") == TRACE
        assert told["rpc.method"] == "enginecore.v1.Inference/Generate" and told["rpc.response.status_code"] == "OK"
        assert told["gen_ai.usage.output_tokens"] == 2


async def test_vectors() -> None:
    async with traced(server=pooling_server()) as (wire, found):
        await wire.http.post("/v1/embeddings", input="hello world")
        span, told = only(found)
        assert span.name == "embeddings toy" and told["gen_ai.usage.input_tokens"] == 2
        await wire.stub.Embed(pb.EmbedRequest(texts=["hello world"]))
        assert only(found)[0].name == span.name


async def test_a_caller_that_does_not_sample_is_followed() -> None:
    async with traced() as (wire, found):
        for parent, count in ((f"00-{TRACE}-{PARENT}-00", 0), ("nonsense", 1)):
            await wire.http.http.post("/v1/completions", json={"prompt": "x"}, headers={"traceparent": parent})
            assert len(found.get_finished_spans()) == count
        assert only(found)[0].parent is None


async def test_failures() -> None:
    async with traced(args=ServerArgs(key_requests_per_minute=3)) as (wire, found):
        await wire.http.post("/v1/completions", prompt="x", temperature=-1)
        span, told = only(found)
        assert told["error.type"] == "invalid_value" and told["http.response.status_code"] == 400
        assert span.status.status_code == StatusCode.UNSET, "the client's fault"
        wire.http.engine.pause = True
        exchange = Exchange(wire.http.app, "/v1/completions", {"prompt": "x", "max_tokens": 9}, headers=None).start()
        while not wire.http.engine.num_live:
            await asyncio.sleep(0.001)
        exchange.hang_up()
        assert exchange.task is not None
        await exchange.task
        assert only(found)[1]["error.type"] == "client_gone"
        wire.http.engine.pause = False
        stream = Exchange(wire.http.app, "/v1/completions", {"prompt": "x", "stream": True, "ignore_eos": True},
                          headers=None)  # fmt: skip
        stream.gate.clear()
        stream.start()
        while not wire.http.engine.requests[1:]:
            await asyncio.sleep(0.001)
        wire.http.engine.die()
        stream.gate.set()
        assert stream.task is not None
        await stream.task
        span, told = only(found)
        assert told["error.type"] == "engine_dead" and span.status.status_code == StatusCode.ERROR
        wire.http.engine.alive = True
        wire.http.llm.dead_error = None
        assert (await wire.http.post("/tokenize", prompt="x")).status_code == 429
        assert only(found)[1]["error.type"] == "rate_limit_exceeded"


def test_spans_reach_a_collector() -> None:
    got: list[tuple[str, bytes]] = []

    class Collector(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            got.append((self.path, self.rfile.read(int(self.headers["content-length"]))))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            pass

    with http.server.HTTPServer(("127.0.0.1", 0), Collector) as collector:
        threading.Thread(target=collector.serve_forever, daemon=True).start()
        tracer = make_tracer(f"http://127.0.0.1:{collector.server_port}/v1/traces", "toy")
        assert tracer is not None
        tracer.start("/v1/completions", {}, "id", rpc=False).end(None, "200", None, ours=False)
        tracer.close()
        collector.shutdown()
    assert got and got[0][0] == "/v1/traces" and b"text_completion toy" in got[0][1]


WITHOUT = """
import sys
sys.modules["opentelemetry.sdk"] = None
from enginecore.cli.main import main
sys.exit(main(["serve", "no-such-model", "--otlp-traces-endpoint", "http://127.0.0.1:1/v1/traces"]))
"""


def test_a_missing_package_and_a_bad_url_are_told_at_once() -> None:
    done = subprocess.run([sys.executable, "-c", WITHOUT], capture_output=True, text=True, timeout=120)
    assert done.returncode == 1 and "enginecore[otel]" in done.stderr and "Traceback" not in done.stderr, done.stderr
    with pytest.raises(ParameterError, match="otlp_traces_endpoint"):
        ServerArgs(otlp_traces_endpoint="localhost:4317")
