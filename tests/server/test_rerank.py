"""POST /v1/score and /v1/rerank with their other names, over an engine whose numbers are known."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.frontend.toy import ToyTokenizer
from tests.server.fake_pooling import CLASSIFIER, CROSS, PairTokenizer, pooling_server, vector

encode = ToyTokenizer().encode
QUERY, DOCUMENTS = "the Paris", ["hello world", "the Paris is", "abc"]
#: Of vectors at unit length.
COSINES = [float(vector(encode(QUERY), 8) @ vector(encode(text), 8)) for text in DOCUMENTS]


@pytest.mark.parametrize("path", ["/v1/score", "/score"])
async def test_one_text_with_each_or_each_with_its_own(path: str) -> None:
    async with pooling_server() as server:
        reply = (await server.post(path, text_1=QUERY, text_2=DOCUMENTS)).json()
        assert np.allclose([entry["score"] for entry in reply["data"]], COSINES)
        assert len(server.engine.requests) == 4, "the query is embedded once"
        assert reply["usage"]["total_tokens"] == sum(len(each.prompt_token_ids) for each in server.engine.requests)
        same = (await server.post(path, text_1=DOCUMENTS, text_2=DOCUMENTS)).json()
        assert np.allclose([entry["score"] for entry in same["data"]], 1)


@pytest.mark.parametrize("path", ["/v1/rerank", "/rerank", "/v2/rerank"])
async def test_documents_come_back_best_first(path: str) -> None:
    async with pooling_server() as server:
        reply = (await server.post(path, query=QUERY, documents=[*DOCUMENTS[:2], {"text": DOCUMENTS[2]}])).json()
        order = sorted(range(3), key=lambda index: -COSINES[index])
        assert [entry["index"] for entry in reply["results"]] == order
        assert np.allclose([entry["relevance_score"] for entry in reply["results"]], [COSINES[i] for i in order])
        assert [entry["document"]["text"] for entry in reply["results"]] == [DOCUMENTS[i] for i in order]
        best = (await server.post(path, query=QUERY, documents=DOCUMENTS, top_n=1, return_documents=False)).json()
        assert len(best["results"]) == 1 and "document" not in best["results"][0] and best["usage"]["total_tokens"]


async def test_a_model_with_one_label_reads_pairs() -> None:
    async with pooling_server(CROSS) as server:
        reply = (await server.post("/score", text_1=QUERY, text_2=DOCUMENTS[:2])).json()
        assert [entry["score"] for entry in reply["data"]] == [1, 1]  # a vector of one entry
        for request, text in zip(server.engine.requests, DOCUMENTS, strict=False):
            ids, kinds = PairTokenizer().encode_pair(QUERY, text)
            assert request.prompt_token_ids == ids and request.second_from == kinds.index(1)
            assert request.pooling is not None and request.pooling.task == "classify"
        long = {"text_1": "abc " * 30, "text_2": "hello", "truncate_prompt_tokens": 20}
        assert (await server.post("/score", **long)).status_code == 200
        request = server.engine.requests[-1]
        first = encode("abc " * 30)[: 20 - 2 - len(encode("hello"))]
        assert request.prompt_token_ids == [*first, 272, *encode("hello"), 272]
        assert request.second_from == len(first) + 1


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/score", {"text_2": "a"}, "text_1"),
        ("/score", {"text_1": "a", "text_2": []}, "text_2"),
        ("/score", {"text_1": ["a", "b"], "text_2": ["a", "b", "c"]}, "text_2"),
        ("/score", {"text_1": "a", "text_2": ["a", ""]}, "text_2[1]"),
        ("/rerank", {"documents": ["a"]}, "query"),
        ("/rerank", {"query": "a"}, "documents"),
        ("/rerank", {"query": "a", "documents": ["a", {"title": "b"}]}, "documents[1]"),
        ("/rerank", {"query": "a", "documents": ["a"], "top_n": -1}, "top_n"),
        ("/rerank", {"query": "a", "documents": ["a"] * 2049}, "documents"),
        ("/rerank", {"query": "a", "documents": ["b " * 99]}, "documents[0]"),
        ("/v2/rerank", {"query": "a", "documents": ["a"], "max_tokens_per_doc": 5}, "max_tokens_per_doc"),
    ],
)
async def test_refusals_name_the_field(path: str, body: dict[str, Any], param: str) -> None:
    async with pooling_server() as server:
        reply = await server.post(path, **body)
        assert (reply.status_code, reply.json()["error"]["param"]) == (400, param), reply.text
        assert not server.engine.requests


async def test_a_model_with_several_labels_scores_no_pairs() -> None:
    async with pooling_server(CLASSIFIER) as server:
        reply = await server.post("/rerank", query="a", documents=["b"])
        assert reply.status_code == 400 and "/classify" in reply.json()["error"]["message"]
