"""Embed: the vectors of /v1/embeddings."""

from __future__ import annotations

from typing import Any

import grpc
import pytest
from enginecore.server.args import ServerArgs
from enginecore.server.grpc import enginecore_pb2 as pb
from enginecore.server.pooled import MAX_INPUTS, WAVE

from tests.server.fake_pooling import CLASSIFIER, pooling_server
from tests.server.grpc.wire import wired

Code = grpc.StatusCode


async def refused(call: Any) -> tuple[grpc.StatusCode, str]:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return caught.value.code(), str(dict(caught.value.trailing_metadata() or ()).get("x-error-param"))


async def test_the_vectors_of_the_http_route() -> None:
    async with wired(server=pooling_server()) as wire:
        texts = ["hello world", "the Paris"]
        ids = [[1, 2], [3]]
        for request, body in (
            (pb.EmbedRequest(texts=texts), {"input": texts}),
            (pb.EmbedRequest(token_ids=[pb.TokenIds(ids=each) for each in ids]), {"input": ids}),
            (pb.EmbedRequest(texts=texts, dimensions=4, model="toy"), {"input": texts, "dimensions": 4}),
            (
                pb.EmbedRequest(texts=["ab" * 99], truncate_prompt_tokens=-1, normalize=True, add_special_tokens=False),
                {"input": "ab" * 99, "truncate_prompt_tokens": -1, "normalize": True, "add_special_tokens": False},
            ),
        ):
            mine = await wire.stub.Embed(request, metadata=(("x-request-id", "mine"),))
            first = wire.http.engine.requests[:]
            wire.http.engine.requests.clear()
            http = (await wire.http.post("/v1/embeddings", **body)).json()
            assert [list(each.values) for each in mine.embeddings] == [each["embedding"] for each in http["data"]]
            assert mine.usage.prompt_tokens == http["usage"]["prompt_tokens"] and mine.request_id == "mine"
            assert [each.pooling for each in first] == [each.pooling for each in wire.http.engine.requests]
            wire.http.engine.requests.clear()
        many = await wire.stub.Embed(pb.EmbedRequest(texts=["ab"] * (WAVE + 3)))
        assert len(many.embeddings) == WAVE + 3 and many.embeddings[-1] == many.embeddings[0]


async def test_refusals() -> None:
    async with wired(server=pooling_server(args=ServerArgs(api_keys=("k",)))) as wire:
        for request, code, param in (
            (pb.EmbedRequest(), Code.INVALID_ARGUMENT, "texts"),
            (pb.EmbedRequest(texts=["x"], token_ids=[pb.TokenIds(ids=[1])]), Code.INVALID_ARGUMENT, "texts"),
            (pb.EmbedRequest(texts=["x", ""]), Code.INVALID_ARGUMENT, "texts[1]"),
            (pb.EmbedRequest(token_ids=[pb.TokenIds(ids=[999])]), Code.INVALID_ARGUMENT, "token_ids[0]"),
            (pb.EmbedRequest(texts=["x"], dimensions=5), Code.INVALID_ARGUMENT, "dimensions"),
            (pb.EmbedRequest(texts=["x"] * (MAX_INPUTS + 1)), Code.INVALID_ARGUMENT, "texts"),
            (pb.EmbedRequest(texts=["x"], model="y"), Code.NOT_FOUND, "model"),
        ):
            assert await refused(wire.stub.Embed(request, metadata=(("x-api-key", "k"),))) == (code, param)
            assert await refused(wire.stub.Embed(request)) == (Code.UNAUTHENTICATED, "None")
        generate = wire.stub.Generate(pb.GenerateRequest(text="x"), metadata=(("x-api-key", "k"),))
        assert await refused(generate) == (Code.UNIMPLEMENTED, "model")
    async with wired(server=pooling_server(CLASSIFIER)) as wire:
        assert await refused(wire.stub.Embed(pb.EmbedRequest(texts=["x"]))) == (Code.INVALID_ARGUMENT, "task")
    async with wired() as wire:
        assert await refused(wire.stub.Embed(pb.EmbedRequest(texts=["x"]))) == (Code.UNIMPLEMENTED, "model")
