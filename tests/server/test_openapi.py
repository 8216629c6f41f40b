"""The OpenAPI document, and what schemathesis makes of it: whatever is sent, the server does not fail."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractAsyncContextManager
from typing import Any

import httpx
import pytest
import schemathesis
import uvicorn
from enginecore.request import EngineRequest
from enginecore.server.app import ROUTES
from enginecore.server.args import ServerArgs
from enginecore.server.http import limited_protocol
from enginecore.server.kinds import POOLING
from enginecore.server.openapi import BODIES, document
from hypothesis import HealthCheck, given, seed, settings
from schemathesis import BaseSchema, GenerationMode

from tests.server.fake_engine import Running, running
from tests.server.fake_pooling import pooling_server
from tests.server.test_account import BLOCKS
from tests.server.test_pins import TOLD
from tests.serving import free_port

KEY = {"authorization": "Bearer k"}
#: A few for each way of generating: the point is every route and field, not depth.
EXAMPLES = 3


def brief(request: EngineRequest) -> tuple[list[int], bool]:
    return [65, 66, 67], True


@contextlib.contextmanager
def serving(world_of: Callable[[ServerArgs], AbstractAsyncContextManager[Running]]) -> Iterator[httpx.Client]:
    """A real HTTP server in a thread, over a scripted engine."""
    port, started, stop = free_port(), threading.Event(), threading.Event()

    async def serve() -> None:
        async with world_of(ServerArgs(api_keys=("k",))) as world:
            world.engine.answers |= {"memory": BLOCKS, "pin": TOLD, "list_pins": [TOLD]}
            options: dict[str, Any] = {"log_config": None, "lifespan": "off", "http": limited_protocol(65536)}
            server = uvicorn.Server(uvicorn.Config(world.app, port=port, **options))
            task = asyncio.create_task(server.serve())
            while not server.started:
                await asyncio.sleep(0.01)
            started.set()
            while not stop.is_set():
                await asyncio.sleep(0.02)
            assert world.llm.num_sequences == 0 and not world.engine.num_live, "nothing is left behind"
            server.should_exit = True
            await task

    thread = threading.Thread(target=asyncio.run, args=(serve(),), daemon=True)
    thread.start()
    assert started.wait(60)
    with httpx.Client(base_url=f"http://127.0.0.1:{port}", headers=KEY, timeout=30) as client:
        yield client
    stop.set()
    thread.join(30)
    assert not thread.is_alive()


@pytest.fixture(scope="module")
def http() -> Iterator[httpx.Client]:
    with serving(lambda args: running(brief, args=args, max_model_len=2048, max_num_seqs=64)) as client:
        yield client


@pytest.fixture(scope="module")
def pooling_http() -> Iterator[httpx.Client]:
    with serving(lambda args: pooling_server(args=args, max_model_len=2048, max_num_seqs=64)) as client:
        yield client


@pytest.fixture(scope="module")
def schema(http: httpx.Client) -> BaseSchema:
    raw = http.get("/openapi.json").raise_for_status().json()
    del raw["security"], raw["components"]["securitySchemes"]  # the client has the key
    return schemathesis.openapi.from_dict(raw)


def test_the_document_has_every_route_and_field() -> None:
    found = document(ROUTES)
    told = {(method.upper(), path) for path, methods in found["paths"].items() for method in methods}
    assert told == {(method, path.replace(":path}", "}")) for method, path, _ in ROUTES}
    schemas = found["components"]["schemas"]
    for path, body in BODIES.items():
        assert "requestBody" in found["paths"][path]["post"]
        assert set(body.__struct_fields__) <= set(schemas[body.__name__]["properties"])
    assert "seed" in schemas["ResponsesRequest"]["properties"]
    text = json.dumps(found)
    for reference in {part.split('"')[0] for part in text.split("#/components/schemas/")[1:]}:
        assert reference in schemas
    bodiless = {"/ping", "/reset_prefix_cache", "/sleep", "/wake_up", "/v1/responses/{response_id}/cancel"}
    posts = {path for method, path, _ in ROUTES if method == "POST"}
    assert posts - set(BODIES) <= bodiless, "a POST with a body has to have its schema here"


OPERATIONS = sorted((method, path.replace(":path}", "}")) for method, path, _ in ROUTES)


@pytest.mark.parametrize(("method", "path"), OPERATIONS)
def test_nothing_makes_the_server_fail(
    request: pytest.FixtureRequest, schema: BaseSchema, method: str, path: str
) -> None:
    """Bodies and parameters that fit the document, and ones that do not: every answer is one that is documented."""
    http: httpx.Client = request.getfixturevalue("pooling_http" if path in POOLING else "http")
    operation, raw = schema[path][method], schema.raw_schema
    mixed = operation.as_strategy(GenerationMode("positive")) | operation.as_strategy(GenerationMode("negative"))
    plain = not (raw["paths"][path][method.lower()].keys() & {"parameters", "requestBody"})

    @seed(0)
    @settings(max_examples=1 if plain else 2 * EXAMPLES, deadline=None, database=None,
              suppress_health_check=list(HealthCheck))  # fmt: skip
    @given(case=operation.as_strategy(GenerationMode("positive")) if plain else mixed)
    def check(case: schemathesis.Case[Any]) -> None:
        if isinstance(case.body, dict) and isinstance(case.body.get("model"), str):
            case.body["model"] = "toy"  # any other is a 404 and nothing more
        options = case.as_transport_kwargs(base_url=str(http.base_url))
        body = {name: options[name] for name in ("json", "data") if options.get(name) is not None}
        if "data" in body:
            body["content"] = body.pop("data")
        headers = {name: value for name, value in options["headers"].items() if name.lower() == "content-type"}
        reply = http.request(options["method"], options["url"], params=options.get("params"), headers=headers, **body)
        assert reply.status_code < 500 or (reply.status_code, method) == (501, "POST"), (reply.text[:500], case.body)
        if reply.status_code >= 400:
            error = json.loads(reply.text)
            assert error.get("type") == "error" if path.startswith("/v1/messages") else set(error) == {"error"}

    http.post("/wake_up")  # an engine that another route has put to sleep answers 503
    check()
