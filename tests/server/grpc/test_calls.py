"""What stands before the methods: keys, limits, statuses, cancelling, the audit."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import pytest
from enginecore.server.args import ServerArgs
from enginecore.server.grpc import enginecore_pb2 as pb
from enginecore.server.grpc.server import SERVICE
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from tests.server.fake_engine import saying
from tests.server.grpc.wire import Wire, halt_after_a_step, wired

Code = grpc.StatusCode
LONG = pb.GenerateRequest(text="ab", sampling=pb.Sampling(max_tokens=60, ignore_eos=True))
HEALTHY = health_pb2.HealthCheckResponse.SERVING


async def refused(call: Any) -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return caught.value


def told(error: grpc.aio.AioRpcError) -> dict[str, Any]:
    return dict(error.trailing_metadata() or ())


async def until(condition: Callable[[], bool]) -> None:
    for _ in range(4000):
        if condition():
            return
        await asyncio.sleep(0.005)
    raise AssertionError("it did not come to that")


async def gone(wire: Wire) -> None:
    """Nothing of a call is left, in the engine or in the counts."""
    await until(lambda: not wire.http.engine.num_live and not wire.http.llm.num_sequences)
    await until(lambda: not wire.http.app.state.in_flight)


@pytest.mark.parametrize(
    ("request_", "code", "param"),
    [
        (pb.GenerateRequest(), Code.INVALID_ARGUMENT, "prompt"),
        (pb.GenerateRequest(text="x", sampling=pb.Sampling(temperature=-1)), Code.INVALID_ARGUMENT, "temperature"),
        (pb.GenerateRequest(text="x", sampling=pb.Sampling(top_p=float("nan"))), Code.INVALID_ARGUMENT, "top_p"),
        (pb.GenerateRequest(text="x", sampling=pb.Sampling(max_tokens=2**32 - 1)), Code.INVALID_ARGUMENT, "max_tokens"),
        (pb.GenerateRequest(token_ids=pb.TokenIds(ids=[2**31])), Code.INVALID_ARGUMENT, "token_ids"),
        (pb.GenerateRequest(token_ids=pb.TokenIds()), Code.INVALID_ARGUMENT, "token_ids"),
        (pb.GenerateRequest(text="x", structured_outputs=pb.StructuredOutputs(json="{")), Code.INVALID_ARGUMENT,
         "structured_outputs.json"),
        (pb.GenerateRequest(text="x", structured_outputs=pb.StructuredOutputs()), Code.INVALID_ARGUMENT,
         "structured_outputs"),
        (pb.GenerateRequest(chat=pb.Chat()), Code.INVALID_ARGUMENT, "messages"),
        (pb.GenerateRequest(chat=pb.Chat(messages=[pb.Message(role="king", content="x")])), Code.INVALID_ARGUMENT,
         "messages[0].role"),
        (pb.GenerateRequest(text="x", model="another"), Code.NOT_FOUND, "model"),
        (pb.GenerateRequest(text="x", priority=3), Code.INVALID_ARGUMENT, "priority"),
    ],
)  # fmt: skip
async def test_bad_requests(request_: pb.GenerateRequest, code: grpc.StatusCode, param: str) -> None:
    async with wired(saying("hello")) as wire:
        error = await refused(wire.stub.Generate(request_))
        assert error.code() == code and told(error)["x-error-param"] == param, (error.details(), told(error))
        stream = wire.stub.GenerateStream(request_)
        assert (await refused(anext(aiter(stream)))).details() == error.details() and error.details()
        assert (await wire.stub.Generate(pb.GenerateRequest(text="x"))).choices[0].text == "hello"
        await gone(wire)


async def test_a_message_that_is_too_large() -> None:
    async with wired(args=ServerArgs(max_body_bytes=1000)) as wire:
        error = await refused(wire.stub.Tokenize(pb.TokenizeRequest(text="x" * 2000)))
        assert error.code() == Code.RESOURCE_EXHAUSTED
        assert (await wire.stub.Tokenize(pb.TokenizeRequest(text="x" * 500))).token_ids


async def test_cancelling_and_deadlines_free_what_a_call_held() -> None:
    async with wired() as wire:
        engine = wire.http.engine
        halt_after_a_step(wire)
        stream = wire.stub.GenerateStream(LONG)
        await anext(aiter(stream))
        assert engine.num_live == 1
        stream.cancel()
        await gone(wire)
        assert len(engine.aborted) == 1
        call = asyncio.ensure_future(wire.stub.Generate(LONG))
        await until(lambda: engine.num_live == 1)
        call.cancel()
        await gone(wire)
        late = [wire.stub.Generate(LONG, timeout=0.2), anext(aiter(wire.stub.GenerateStream(LONG, timeout=0.2)))]
        for error in await asyncio.gather(*(refused(each) for each in late)):
            assert error.code() == Code.DEADLINE_EXCEEDED
        await gone(wire)
        assert len(engine.requests) == len(engine.aborted) == 4


async def test_keys_on_everything_but_health(tmp_path: Path) -> None:
    log = tmp_path / "audit"
    args = ServerArgs(api_keys=("mary:k1",), audit_log=str(log), audit_bodies=True)
    async with wired(saying("hello"), args=args) as wire:
        health = health_pb2_grpc.HealthStub(wire.channel)
        for name in ("", SERVICE):
            assert (await health.Check(health_pb2.HealthCheckRequest(service=name))).status == HEALTHY
        request, mine = pb.GenerateRequest(text="secret"), (("x-api-key", "k1"),)
        asked = reflection_pb2.ServerReflectionRequest(list_services="")
        mirror = reflection_pb2_grpc.ServerReflectionStub(wire.channel).ServerReflectionInfo
        for metadata in ((), (("authorization", "Bearer wrong"),)):
            for method in ("Generate", "Embed", "Tokenize", "Detokenize"):
                call = getattr(wire.stub, method)(getattr(pb, f"{method}Request")(), metadata=metadata)
                assert (await refused(call)).code() == Code.UNAUTHENTICATED
            stream = anext(aiter(wire.stub.GenerateStream(request, metadata=metadata)))
            assert (await refused(stream)).code() == Code.UNAUTHENTICATED
            seen = anext(aiter(mirror(iter([asked]), metadata=metadata)))
            assert (await refused(seen)).code() == Code.UNAUTHENTICATED
        assert not wire.http.engine.requests
        for metadata in (mine, (("authorization", "Bearer k1"),)):
            assert (await wire.stub.Generate(request, metadata=metadata)).choices
        answer = await anext(aiter(mirror(iter([asked]), metadata=mine)))
        names = {service.name for service in answer.list_services_response.service}
        assert names == {SERVICE, "grpc.health.v1.Health", "grpc.reflection.v1alpha.ServerReflection"}
        await gone(wire)
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    last = [line for line in lines if line["path"] == f"/{SERVICE}/Generate" and line["status"] == "OK"][-1]
    assert (last["client"], last["method"], last["generated_tokens"]) == ("mary", "gRPC", 2)
    assert json.loads(last["body"]) == {"text": "secret"} and last["address"].startswith("ipv4:127.0.0.1")
    assert sum(line["status"] == "UNAUTHENTICATED" and line["client"] is None for line in lines) == 12


async def test_the_limits_of_a_key() -> None:
    args = ServerArgs(key_concurrency=1, key_requests_per_minute=3)
    async with wired(args=args) as wire:
        halt_after_a_step(wire)
        stream = wire.stub.GenerateStream(LONG)
        await anext(aiter(stream))
        over_http = await wire.http.post("/v1/completions", prompt="x", max_tokens=1)
        assert over_http.status_code == 429, "one count for both"
        error = await refused(wire.stub.Generate(LONG))
        assert error.code() == Code.RESOURCE_EXHAUSTED and told(error)["retry-after"] == "1"
        stream.cancel()
        await gone(wire)
        for _ in range(2):
            await wire.stub.Tokenize(pb.TokenizeRequest(text="x"))
        error = await refused(wire.stub.Tokenize(pb.TokenizeRequest(text="x")))
        assert error.code() == Code.RESOURCE_EXHAUSTED and told(error)["x-error-code"] == "rate_limit_exceeded"


async def test_the_queues_limit() -> None:
    async with wired(args=ServerArgs(max_waiting=0), max_num_seqs=1) as wire:
        halt_after_a_step(wire)
        stream = wire.stub.GenerateStream(LONG)
        await anext(aiter(stream))
        error = await refused(wire.stub.Generate(LONG))
        assert error.code() == Code.RESOURCE_EXHAUSTED and told(error)["x-error-code"] == "queue_full"
        stream.cancel()
        await gone(wire)


async def test_a_server_that_closes_and_an_engine_that_dies() -> None:
    async with wired() as wire:
        health = health_pb2_grpc.HealthStub(wire.channel)
        wire.http.engine.pause = True
        running = asyncio.ensure_future(refused(wire.stub.Generate(LONG)))
        await until(lambda: wire.http.engine.num_live == 1)
        wire.http.app.state.draining = True
        await wire.rpc.drain()
        assert (await refused(wire.stub.Generate(LONG))).code() == Code.UNAVAILABLE
        assert (await health.Check(health_pb2.HealthCheckRequest())).status != HEALTHY
        wire.http.app.state.draining = False
        wire.http.engine.die()
        wire.http.engine.pause = False
        assert (await running).code() == Code.UNAVAILABLE
        error = await refused(wire.stub.Generate(LONG))
        assert error.code() == Code.UNAVAILABLE and told(error)["x-error-code"] == "engine_dead"


async def test_one_that_the_engine_refuses() -> None:
    async with wired() as wire:
        wire.http.engine.refuse = "it needs more cache than there is"
        error = await refused(wire.stub.Generate(LONG))
        assert error.code() == Code.INVALID_ARGUMENT and "more cache" in (error.details() or "")


async def test_a_surprise_is_internal_and_tells_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    async with wired() as wire:
        monkeypatch.setattr(wire.http.llm.input, "process", lambda *_, **__: 1 // 0)
        error = await refused(wire.stub.Generate(LONG))
        assert (error.code(), error.details()) == (Code.INTERNAL, "internal error")
        await gone(wire)
