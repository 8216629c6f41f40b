"""F51: vectors by the real embedding model: every encoding and kind of input, in order, the same alone and together."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from tests.field.support import PASSIVE, refused
from tests.serving import ServerProcess

ROUTE = "/v1/embeddings"
TEXTS = ["a cat", "A dog sleeps under the old table.", "x", "Paris is the capital of France. " * 6, "naïve café – 猫"]


@pytest.fixture(scope="module")
def embedder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """all-MiniLM-L6-v2, told that the first 128 and 64 numbers of its vectors may stand for all 384."""
    log = tmp_path_factory.mktemp("embedder") / "log"
    options = ("--dtype", "float32", "--pooler-config", '{"matryoshka": [64, 128]}')
    with ServerProcess(*options, model="all-minilm-l6-v2", log=log, env=PASSIVE) as running:
        yield running


def vectors(server: ServerProcess, given: Any, **fields: Any) -> np.ndarray:
    reply = server.post(ROUTE, {"input": given, **fields})
    assert reply.status_code == 200, reply.text
    data = reply.json()["data"]
    assert [entry["index"] for entry in data] == list(range(len(data)))
    return np.array([entry["embedding"] for entry in data])


@pytest.mark.model
def test_encodings_order_norms_and_batches(embedder: ServerProcess) -> None:
    together = vectors(embedder, TEXTS)
    assert together.shape == (5, 384) and np.allclose(np.linalg.norm(together, axis=1), 1, atol=1e-5)
    alone = np.concatenate([vectors(embedder, text) for text in TEXTS])
    assert np.abs(together - alone).max() < 1e-5
    assert np.abs(vectors(embedder, TEXTS[::-1]) - together[::-1]).max() < 1e-5
    coded = embedder.post(ROUTE, {"input": TEXTS, "encoding_format": "base64"}).json()["data"]
    raw = [base64.b64decode(entry["embedding"]) for entry in coded]
    assert all(len(each) == 4 * 384 for each in raw)
    assert np.abs(np.array([np.frombuffer(each, "<f4") for each in raw]) - together).max() < 1e-6


@pytest.mark.model
def test_token_ids_usage_and_truncation(embedder: ServerProcess) -> None:
    ids = embedder.post("/tokenize", {"prompt": TEXTS[1]}).json()["tokens"]
    for given in (ids, [ids, ids]):
        found = vectors(embedder, given)
        assert np.abs(found - vectors(embedder, TEXTS[1])).max() < 1e-5
    usage = embedder.post(ROUTE, {"input": [ids, ids]}).json()["usage"]
    assert usage["prompt_tokens"] == usage["total_tokens"] == 2 * len(ids)
    long = "word " * 1000
    refused(embedder.post(ROUTE, {"input": long}), param="input")
    cut = embedder.post(ROUTE, {"input": long, "truncate_prompt_tokens": -1})
    longest = embedder.http.get("/v1/models").json()["data"][0]["max_model_len"]
    assert cut.json()["usage"]["prompt_tokens"] == longest


@pytest.mark.model
def test_dimensions(embedder: ServerProcess) -> None:
    whole, short = vectors(embedder, TEXTS), vectors(embedder, TEXTS, dimensions=64)
    wanted = whole[:, :64] / np.linalg.norm(whole[:, :64], axis=1, keepdims=True)
    assert np.abs(short - wanted).max() < 1e-5
    for wrong in (65, 385, 0):
        refused(embedder.post(ROUTE, {"input": "x", "dimensions": wrong}), param="dimensions")
    refused(embedder.post(ROUTE, {"input": "x", "encoding_format": "hex"}), param="encoding_format")


@pytest.mark.model
def test_a_model_that_generates_has_no_vectors_and_one_of_vectors_does_not_chat(
    server: ServerProcess, embedder: ServerProcess
) -> None:
    answer = server.post(ROUTE, {"input": "x"})
    assert answer.status_code in (400, 404) and "embed" in answer.json()["error"]["message"]
    chat = embedder.post("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]})
    assert chat.status_code in (400, 404) and "/v1/embeddings" in chat.json()["error"]["message"]
