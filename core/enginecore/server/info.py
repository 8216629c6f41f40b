"""Routes that tell about the server: models, health, version, metrics."""

from __future__ import annotations

import time
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from enginecore._version import __version__
from enginecore.adapters import AdapterInfo
from enginecore.metrics import CONTENT_TYPE
from enginecore.server.errors import ApiError
from enginecore.server.generation import json_response
from enginecore.server.state import ServerState


def _model(state: ServerState, adapter: AdapterInfo | None = None) -> dict[str, Any]:
    name = state.model_name if adapter is None else adapter.name
    created = state.created if adapter is None else adapter.created
    return {
        "id": name,
        "object": "model",
        "created": created,
        "owned_by": "enginecore",
        "root": state.llm.config.model if adapter is None else name,
        "parent": None if adapter is None else state.model_name,
        "max_model_len": state.llm.config.max_model_len,
        # Anthropic's names for it
        "type": "model",
        "display_name": name,
        "created_at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(created)),
        "lifecycle": "active",
        "max_input_tokens": state.llm.config.max_model_len,
    }


async def models(state: ServerState, request: Request) -> Response:
    """The model that is served and the adapters of it, in one object for OpenAI's clients and Anthropic's."""
    data = [_model(state), *(_model(state, info) for info in state.llm.adapters.all())]
    page = {"has_more": False, "first_id": data[0]["id"], "last_id": data[-1]["id"]}
    return json_response({"object": "list", "data": data, **page})


async def model(state: ServerState, request: Request) -> Response:
    """What is known of the model, or of an adapter."""
    name: str = request.path_params["model"]
    adapter = state.llm.adapters.get(name)
    if adapter is None:
        state.check_model(name)
    return json_response(_model(state, adapter))


async def health(state: ServerState, request: Request) -> Response:
    """200 while requests can be served; 503 when the engine is gone or the server is closing."""
    state.check_ready()
    return json_response({"status": "ok"})


async def load(state: ServerState, request: Request) -> Response:
    """What balancers ask: requests in flight, sequences running and waiting, and how full the cache is."""
    stats = state.llm.stats
    used = stats.num_used_blocks / stats.num_blocks if stats.num_blocks else 0.0
    answer = {
        "server_load": state.in_flight - 1,  # without this one
        "num_running": stats.num_running,
        "num_waiting": stats.num_waiting,
        "kv_cache_usage": used,
    }
    return json_response(answer)


async def version(state: ServerState, request: Request) -> Response:
    return json_response({"version": __version__})


async def metrics(state: ServerState, request: Request) -> Response:
    return Response(state.metrics.render(), headers={"content-type": CONTENT_TYPE})


async def fingerprint(state: ServerState, request: Request) -> Response:
    """GET /v1/fingerprint: that of this server."""
    return json_response(state.fingerprint)


async def fingerprint_by_id(state: ServerState, request: Request) -> Response:
    """GET /v1/fingerprint/{id}: what the `system_fingerprint` of an answer stands for."""
    given: str = request.path_params["fingerprint_id"]
    found = state.find_fingerprint(given)
    if found is None:
        raise ApiError(404, f"this server's fingerprint is {state.fingerprint['id']}", code="fingerprint_not_found")
    return json_response(found)
