"""The official gRPC client and the real model, in the process that serves HTTP too."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from typing import Any

import grpc
import pytest
from enginecore.server.grpc import enginecore_pb2 as pb
from enginecore.server.grpc.enginecore_pb2_grpc import InferenceStub
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tests.e2e.clients.conftest import KEY
from tests.serving import MODEL_NAME, ServerProcess

MINE = (("authorization", f"Bearer {KEY}"),)
GREEDY = {"temperature": 0.0, "max_tokens": 12}


@pytest.fixture(scope="module")
def channel(server: ServerProcess) -> Iterator[grpc.Channel]:
    found = re.search(r"gRPC at (\S+)", server.log.read_text())
    assert found is not None
    with grpc.insecure_channel(found[1]) as opened:
        yield opened


def test_the_same_answers_as_over_http(channel: grpc.Channel, server: ServerProcess) -> None:
    stub = InferenceStub(channel)
    request = pb.GenerateRequest(model=MODEL_NAME, text="The capital of France is", sampling=pb.Sampling(**GREEDY))
    answer = stub.Generate(request, metadata=MINE, timeout=60)
    headers = {"authorization": f"Bearer {KEY}"}
    body = {"model": MODEL_NAME, "prompt": "The capital of France is", **GREEDY}
    http = server.post("/v1/completions", body, headers=headers).json()
    assert answer.choices[0].text == http["choices"][0]["text"] and "Paris" in answer.choices[0].text
    streamed = list(stub.GenerateStream(request, metadata=MINE, timeout=60))
    assert "".join(part.choices[0].text for part in streamed) == answer.choices[0].text and len(streamed) > 1
    assert streamed[-1].usage.completion_tokens == answer.usage.completion_tokens == 12
    chat = pb.Chat(messages=[pb.Message(role="user", content="Hello, who are you?")])
    told = stub.Generate(pb.GenerateRequest(chat=chat, sampling=pb.Sampling(**GREEDY)), metadata=MINE, timeout=60)
    body = {"model": MODEL_NAME, "messages": [{"role": "user", "content": "Hello, who are you?"}], **GREEDY}
    http = server.post("/v1/chat/completions", body, headers=headers).json()
    assert told.choices[0].text == http["choices"][0]["message"]["content"]
    assert told.usage.prompt_tokens == http["usage"]["prompt_tokens"]
    schema = '{"type": "object", "properties": {"city": {"enum": ["Rome", "Paris"]}}, "required": ["city"]}'
    structure = pb.StructuredOutputs(json=schema)
    request = pb.GenerateRequest(text="A city:", structured_outputs=structure, sampling=pb.Sampling(max_tokens=40))
    assert json.loads(stub.Generate(request, metadata=MINE).choices[0].text)["city"] in ("Rome", "Paris")


def test_a_client_that_goes_away_frees_the_blocks(channel: grpc.Channel, server: ServerProcess) -> None:
    sampling = pb.Sampling(max_tokens=900, ignore_eos=True)
    request = pb.GenerateRequest(text="Once upon a time", sampling=sampling)
    names = [f"enginecore:{name}" for name in ("num_requests_running", "kv_cache_usage_perc")]

    def held() -> list[Any]:
        return [server.metrics()[name] for name in names]

    for cancel in (True, False):
        stream = InferenceStub(channel).GenerateStream(request, metadata=MINE, timeout=None if cancel else 3)
        next(stream)
        assert all(held()), "it runs and holds blocks"
        if cancel:
            stream.cancel()
        with pytest.raises(grpc.RpcError) as caught:
            list(stream)
        code: Any = caught.value
        assert code.code() == (grpc.StatusCode.CANCELLED if cancel else grpc.StatusCode.DEADLINE_EXCEEDED)
        deadline = time.monotonic() + 30
        while any(held()):
            assert time.monotonic() < deadline, held()
            time.sleep(0.02)


def test_health_and_statuses(channel: grpc.Channel) -> None:
    health = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())
    assert health.status == health_pb2.HealthCheckResponse.SERVING
    for request, metadata, code in (
        (pb.GenerateRequest(text="x"), (), grpc.StatusCode.UNAUTHENTICATED),
        (pb.GenerateRequest(text="x", model="y"), MINE, grpc.StatusCode.NOT_FOUND),
        (pb.GenerateRequest(text="word " * 5000), MINE, grpc.StatusCode.INVALID_ARGUMENT),
    ):
        with pytest.raises(grpc.RpcError) as caught:
            InferenceStub(channel).Generate(request, metadata=metadata)
        error: Any = caught.value
        assert error.code() == code
    with pytest.raises(grpc.RpcError) as caught:
        InferenceStub(channel).Embed(pb.EmbedRequest(texts=["x"]), metadata=MINE)
    error = caught.value
    assert error.code() == grpc.StatusCode.UNIMPLEMENTED and "--runner pooling" in error.details()
