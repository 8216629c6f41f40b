"""POST /v1/embeddings, /classify and /pooling over an engine whose numbers are known."""

from __future__ import annotations

import asyncio
import base64
from typing import Any

import numpy as np
import pytest
from enginecore.server.args import ServerArgs
from enginecore.server.pooled import MAX_INPUTS, WAVE

from tests.frontend.toy import ToyTokenizer
from tests.server.asgi import Exchange
from tests.server.fake_engine import running
from tests.server.fake_pooling import CLASSIFIER, pooling_server, vector

encode = ToyTokenizer().encode


async def test_inputs_of_every_kind() -> None:
    async with pooling_server() as server:
        ids = encode("hello world")
        for given, count in (("hello world", 1), (["hello world", "the Paris"], 2), (ids, 1), ([ids, [1, 2]], 2)):
            reply = (await server.post("/v1/embeddings", input=given, model="toy")).json()
            assert [entry["index"] for entry in reply["data"]] == list(range(count))
            assert np.allclose(reply["data"][0]["embedding"], vector(ids, 8))
            tokens = sum(len(request.prompt_token_ids) for request in server.engine.requests[-count:])
            assert reply["usage"] == {"prompt_tokens": tokens, "total_tokens": tokens, "completion_tokens": 0}
        assert reply["object"] == "list" and reply["id"].startswith("embd-") and reply["model"] == "toy"


async def test_base64_is_the_same_numbers_and_dimensions_reach_the_engine() -> None:
    async with pooling_server() as server:
        plain = (await server.post("/v1/embeddings", input="the Paris")).json()["data"][0]["embedding"]
        coded = (await server.post("/v1/embeddings", input="the Paris", encoding_format="base64")).json()
        assert np.frombuffer(base64.b64decode(coded["data"][0]["embedding"]), "<f4").tolist() == plain
        short = (await server.post("/v1/embeddings", input="the Paris", dimensions=4)).json()
        assert len(short["data"][0]["embedding"]) == 4 and server.engine.requests[-1].pooling.dimensions == 4


@pytest.mark.parametrize(
    ("body", "param", "told"),
    [
        ({}, "input", "missing"),
        ({"input": ""}, "input", "empty"),
        ({"input": []}, "input", "empty"),
        ({"input": ["a", [1]]}, "input[1]", "mix"),
        ({"input": [[1], [999]]}, "input[1]", "999"),
        ({"input": ["a", ""]}, "input[1]", "empty"),
        ({"input": "a", "dimensions": 9}, "dimensions", "at most"),
        ({"input": "a", "dimensions": 5}, "dimensions", "one of 4, 8"),
        ({"input": "a", "dimensions": 0}, "dimensions", "from 1"),
        ({"input": "a", "encoding_format": "hex"}, "encoding_format", "hex"),
        ({"input": "a", "truncate_prompt_tokens": 0}, "truncate_prompt_tokens", "at least 1"),
        ({"input": ["a"] * (MAX_INPUTS + 1)}, "input", str(MAX_INPUTS)),
        ({"input": list(range(70))}, "input", "truncate_prompt_tokens"),
        ({"input": "a", "messages": []}, "messages", "not supported"),
        ({"input": "a", "priority": 1}, "priority", "priority"),
    ],
)
async def test_refusals_name_the_field(body: dict[str, Any], param: str, told: str) -> None:
    async with pooling_server() as server:
        reply = await server.post("/v1/embeddings", **body)
        error = reply.json()["error"]
        assert (reply.status_code, error["param"]) == (400, param), error
        assert told in error["message"] and not server.engine.requests


async def test_a_text_that_is_too_long_is_cut_only_when_asked() -> None:
    async with pooling_server() as server:
        ids = [each % 200 for each in range(100)]
        assert (await server.post("/v1/embeddings", input=ids, truncate_prompt_tokens=-1)).status_code == 200
        assert server.engine.requests[-1].prompt_token_ids == ids[:64]
        assert (await server.post("/v1/embeddings", input="the Paris " * 40, truncate_prompt_tokens=5)).is_success
        assert server.engine.requests[-1].prompt_token_ids == encode("the Paris " * 40)[:5]


async def test_many_inputs_go_in_waves_that_leave_room_for_others() -> None:
    async with pooling_server(max_num_seqs=300) as server:
        server.engine.pause = True
        texts = [[each % 256] for each in range(WAVE + 10)]
        exchange = Exchange(server.app, "/v1/embeddings", {"input": texts}).start()
        while len(server.engine.requests) < WAVE:
            await _turn()
        assert server.llm.num_sequences == WAVE
        server.engine.pause = False
        assert exchange.task is not None
        await exchange.task
        assert exchange.status == 200 and len(server.engine.requests) == WAVE + 10


async def test_hanging_up_aborts_what_waits() -> None:
    async with pooling_server() as server:
        server.engine.pause = True
        exchange = Exchange(server.app, "/v1/embeddings", {"input": ["a", "b"]}).start()
        while server.engine.num_live < 2:
            await _turn()
        exchange.hang_up()
        assert exchange.task is not None
        await exchange.task
        assert sorted(server.engine.aborted) == sorted(request.request_id for request in server.engine.requests)
        assert server.llm.num_sequences == 0


async def test_a_text_that_the_engine_gives_up_on_is_an_error_of_its_request() -> None:
    async with pooling_server() as server:
        server.engine.refuse = "the model gave numbers that are not finite for this text"
        reply = await server.post("/v1/embeddings", input="a")
        assert reply.status_code == 400 and "finite" in reply.json()["error"]["message"]
        server.engine.refuse = None
        assert (await server.post("/v1/embeddings", input="a")).status_code == 200


async def test_classes_have_labels() -> None:
    async with pooling_server(CLASSIFIER) as server:
        reply = (await server.post("/classify", input=["abc", "hello"])).json()
        probs = vector(encode("hello"), 3)
        entry = reply["data"][1]
        assert np.allclose(entry["probs"], probs) and entry["num_classes"] == 3
        assert entry["label"] == CLASSIFIER.labels[int(probs.argmax())]
        refused = await server.post("/v1/embeddings", input="abc")
        assert refused.status_code == 400 and "/classify" in refused.json()["error"]["message"]


async def test_pooling_gives_tokens_unless_told_otherwise() -> None:
    async with pooling_server() as server:
        data = (await server.post("/pooling", input="the Paris")).json()["data"][0]["data"]
        assert np.allclose(data, [vector([token], 8) for token in encode("the Paris")])
        whole = (await server.post("/pooling", input="the Paris", task="embed", dimensions=4)).json()
        assert len(whole["data"][0]["data"]) == 4
        for body, param in (
            ({"task": "sing"}, "task"),
            ({"task": "classify"}, "task"),
            ({"dimensions": 4}, "dimensions"),
        ):
            assert (await server.post("/pooling", input="a", **body)).json()["error"]["param"] == param


async def test_routes_that_do_not_fit_the_model_name_the_way_out() -> None:
    async with pooling_server() as server, running() as other:
        for path in ("/v1/chat/completions", "/v1/completions", "/v1/responses"):
            error = (await server.post(path, prompt="a", input="a", messages=[])).json()["error"]
            assert error["code"] == "model_does_not_generate" and "/v1/embeddings" in error["message"], path
        error = (await server.post("/v1/messages")).json()
        assert error["type"] == "error" and "/v1/embeddings" in error["error"]["message"]
        for path in ("/v1/embeddings", "/v1/rerank", "/v2/rerank", "/v1/score", "/classify", "/pooling"):
            reply = await other.post(path, input="a")
            assert reply.status_code == 400 and "--runner pooling" in reply.json()["error"]["message"], path


async def test_keys_limits_and_the_audit_cover_the_routes(tmp_path: Any) -> None:
    log = tmp_path / "audit"
    args = ServerArgs(api_keys=("team:k",), audit_log=str(log), key_tokens_per_minute=10)
    async with pooling_server(args=args) as server:
        for path in ("/v1/embeddings", "/rerank", "/score", "/classify", "/pooling"):
            assert (await server.post(path, input="a")).status_code == 401
        server.http.headers["x-api-key"] = "k"
        reply = await server.post("/v1/embeddings", input=[encode("hello world"), [1] * 20])
        assert reply.status_code == 200 and reply.headers["x-system-fingerprint"].startswith("fp_")
        spent = await server.post("/v1/embeddings", input="a")
        assert (spent.status_code, spent.json()["error"]["code"]) == (429, "rate_limit_exceeded")
        assert server.app.gate.audit is not None
        server.app.gate.audit.close()
    told = log.read_text()
    assert '"client":"team"' in told and f'"prompt_tokens":{len(encode("hello world")) + 20}' in told


async def _turn() -> None:
    await asyncio.sleep(0.001)
