"""The official openai client against a server with a real embedding model."""

from __future__ import annotations

import base64
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import grpc
import numpy as np
import openai
import pytest
from enginecore.frontend.tokenizer import Tokenizer
from enginecore.models.store import resolve_model
from enginecore.server.grpc import enginecore_pb2 as pb
from enginecore.server.grpc.enginecore_pb2_grpc import InferenceStub
from openai.types import CreateEmbeddingResponse

from tests.e2e.clients.conftest import KEY
from tests.serving import MODEL_NAME, ServerProcess

pytestmark = pytest.mark.model

TEXTS = ["Hello world", "A cat sits on the mat.", "Où est la gare?"]


@pytest.fixture(scope="module")
def embedder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    log = tmp_path_factory.mktemp("embedder") / "log"
    with ServerProcess("--api-key", KEY, "--grpc-port", "0", model="all-minilm-l6-v2", log=log) as running:
        running.http.headers["authorization"] = f"Bearer {KEY}"
        yield running


@pytest.fixture(scope="module")
def client(embedder: ServerProcess) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{embedder.url}/v1", api_key=KEY, max_retries=0) as client:
        yield client


def vectors(reply: CreateEmbeddingResponse) -> np.ndarray:
    assert isinstance(reply, CreateEmbeddingResponse) and reply.usage.prompt_tokens == reply.usage.total_tokens > 0
    assert [entry.index for entry in reply.data] == list(range(len(reply.data)))
    return np.array([entry.embedding for entry in reply.data], np.float32)


def test_every_way_to_ask_gives_the_library_s_vectors(client: openai.OpenAI) -> None:
    library = pytest.importorskip("sentence_transformers")
    path = resolve_model("all-minilm-l6-v2").path
    expected = library.SentenceTransformer(path, device="cpu").encode(TEXTS)
    ask = client.embeddings.create
    plain = vectors(ask(model=MODEL_NAME, input=TEXTS, encoding_format="float"))
    assert np.abs(plain - expected).max() < 1e-5
    assert np.array_equal(vectors(ask(model=MODEL_NAME, input=TEXTS)), plain), "the client asks for base64 by itself"
    coded = client.embeddings.with_raw_response.create(model=MODEL_NAME, input=TEXTS[0], encoding_format="base64")
    data = base64.b64decode(coded.http_response.json()["data"][0]["embedding"])
    assert np.array_equal(np.frombuffer(data, "<f4"), plain[0])
    ids = [Tokenizer.load(path).encode(text) for text in TEXTS]
    assert np.array_equal(vectors(ask(model=MODEL_NAME, input=ids)), plain)
    assert np.array_equal(vectors(ask(model=MODEL_NAME, input=ids[1])), plain[1:2])


def test_grpc_gives_the_same_vectors(client: openai.OpenAI, embedder: ServerProcess) -> None:
    found = re.search(r"gRPC at (\S+)", embedder.log.read_text())
    assert found is not None
    plain = vectors(client.embeddings.create(model=MODEL_NAME, input=TEXTS))
    with grpc.insecure_channel(found[1]) as channel:
        stub = InferenceStub(channel)
        answer = stub.Embed(pb.EmbedRequest(texts=TEXTS), metadata=(("x-api-key", KEY),), timeout=60)
        assert np.array_equal(np.array([each.values for each in answer.embeddings], np.float32), plain)
        with pytest.raises(grpc.RpcError, match="for pooling"):
            stub.Generate(pb.GenerateRequest(text="x"), metadata=(("x-api-key", KEY),), timeout=60)


def test_refusals_are_the_client_s_own_errors(client: openai.OpenAI) -> None:
    ask = client.embeddings.create
    with pytest.raises(openai.BadRequestError, match="truncate_prompt_tokens") as long:
        ask(model=MODEL_NAME, input="word " * 1000)
    assert long.value.code == "context_length_exceeded" and long.value.param == "input"
    ask(model=MODEL_NAME, input="word " * 1000, extra_body={"truncate_prompt_tokens": -1})
    with pytest.raises(openai.BadRequestError, match="matryoshka"):
        ask(model=MODEL_NAME, input="a", dimensions=64)
    with pytest.raises(openai.NotFoundError):
        ask(model="other", input="a")
    with pytest.raises(openai.BadRequestError, match="generates no text"):
        client.chat.completions.create(model=MODEL_NAME, messages=[{"role": "user", "content": "Hi"}])
    with pytest.raises(openai.AuthenticationError):
        client.with_options(api_key="wrong").embeddings.create(model=MODEL_NAME, input="a")


def test_the_other_routes_and_many_clients_at_once(embedder: ServerProcess, client: openai.OpenAI) -> None:
    body = {"model": MODEL_NAME, "query": "Where does the cat sit?", "documents": TEXTS}
    best = embedder.post("/v1/rerank", body).json()["results"][0]
    assert best["index"] == 1 and best["document"]["text"] == TEXTS[1]
    texts = [f"{text} {i}" for i in range(40) for text in TEXTS]
    whole = vectors(client.embeddings.create(model=MODEL_NAME, input=texts))
    with ThreadPoolExecutor(8) as threads:
        parts = list(threads.map(lambda text: client.embeddings.create(model=MODEL_NAME, input=text), texts[:24]))
    assert np.array_equal(np.concatenate([vectors(part) for part in parts]), whole[:24])
    told = embedder.http.get(
        f"/v1/requests/{embedder.post('/pooling', {'input': 'a'}).headers['x-request-id']}/explain"
    )
    assert told.json()["sequences"][0]["finish_reason"] == "stop"
    assert embedder.http.get("/v1/memory").json()["kv_cache"]["num_blocks"] == 0
    assert embedder.metrics()["enginecore:prompt_tokens_total"] > 500
    assert embedder.http.get("/load").json()["num_running"] == 0


def test_a_model_that_generates_says_so(server: ServerProcess) -> None:
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key=KEY, max_retries=0)
    with client, pytest.raises(openai.BadRequestError, match="--runner pooling"):
        client.embeddings.create(model=MODEL_NAME, input="a")
