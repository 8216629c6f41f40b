"""Routes that tell about the server: models, health, version, metrics."""

from __future__ import annotations

import time
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from enginecore._version import __version__
from enginecore.metrics import CONTENT_TYPE
from enginecore.server.errors import ApiError
from enginecore.server.generation import json_response
from enginecore.server.state import ServerState


def _model(state: ServerState) -> dict[str, Any]:
    return {
        "id": state.model_name,
        "object": "model",
        "created": state.created,
        "owned_by": "enginecore",
        "root": state.llm.config.model,
        "parent": None,
        "max_model_len": state.llm.config.max_model_len,
        # Anthropic's names for it
        "type": "model",
        "display_name": state.model_name,
        "created_at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(state.created)),
        "lifecycle": "active",
        "max_input_tokens": state.llm.config.max_model_len,
    }


async def models(state: ServerState, request: Request) -> Response:
    """The model that is served, in one object for OpenAI's clients and Anthropic's."""
    name = state.model_name
    page = {"has_more": False, "first_id": name, "last_id": name}
    return json_response({"object": "list", "data": [_model(state)], **page})


async def model(state: ServerState, request: Request) -> Response:
    """What is known of the model."""
    state.check_model(request.path_params["model"])
    return json_response(_model(state))


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
    if given != state.fingerprint["id"]:
        raise ApiError(404, f"this server's fingerprint is {state.fingerprint['id']}", code="fingerprint_not_found")
    return json_response(state.fingerprint)
