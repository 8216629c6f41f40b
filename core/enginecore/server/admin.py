"""Routes for operators. They need a key, and a server without keys does not have them."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from enginecore.server.errors import ApiError
from enginecore.server.generation import json_response
from enginecore.server.state import ServerState


def check_admin(state: ServerState) -> None:
    """The gate has compared the key; without any configured, everybody would be an operator."""
    if not state.args.api_keys:
        raise ApiError(403, "this route needs a server with an API key: start with --api-key", code="admin_needs_key")


async def reset_prefix_cache(state: ServerState, request: Request) -> Response:
    """Forget every cached prefix, of every salt. Sequences that run go on; what they have computed is not offered."""
    check_admin(state)
    return json_response({"object": "prefix_cache.reset", "blocks": await state.llm.reset_prefix_cache()})
