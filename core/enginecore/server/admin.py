"""Routes for operators. They need an operator's key, and a server without keys does not have them."""

from __future__ import annotations

from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from enginecore._version import __version__
from enginecore.errors import EngineDeadError, ParameterError
from enginecore.server.errors import ApiError
from enginecore.server.generation import json_response
from enginecore.server.keys import Client
from enginecore.server.state import ServerState

#: Settings of the server that hold secrets.
_SECRET = frozenset({"api_keys", "admin_keys"})


def check_admin(state: ServerState, request: Request) -> None:
    """The gate has compared the key. Where there are keys for operators, it has to be one of them; without any keys,
    everybody would be an operator."""
    if not len(state.keys):
        raise ApiError(403, "this route needs a server with an API key: start with --api-key", code="admin_needs_key")
    client: Client = request.state.client
    if state.keys.has_admins and not client.admin:
        raise ApiError(403, "this route needs a key for operators (--admin-key)", code="admin_needs_key")


async def reset_prefix_cache(state: ServerState, request: Request) -> Response:
    """Forget every cached prefix, of every salt. Sequences that run go on; what they have computed is not offered."""
    check_admin(state, request)
    return json_response({"object": "prefix_cache.reset", "blocks": await state.llm.reset_prefix_cache()})


async def server_info(state: ServerState, request: Request) -> Response:
    """Every setting, but for the keys, and what was chosen and why."""
    check_admin(state, request)
    server = {k: v for k, v in msgspec.to_builtins(state.args).items() if k not in _SECRET}
    answer: dict[str, Any] = {
        "object": "server_info",
        "version": __version__,
        "engine": msgspec.to_builtins(state.llm.config),
        "server": server,
        "device": {"summary": state.llm.ready.device_summary, "details": state.llm.ready.details},
        "clients": sorted(state.keys.names()),
        "fingerprint": state.fingerprint["id"],
    }
    return json_response(answer)


async def sleep(state: ServerState, request: Request) -> Response:
    """Free the device's memory until /wake_up. Refused while anything runs."""
    check_admin(state, request)
    level = request.query_params.get("level", "1")
    if level not in ("1", "2"):
        raise ParameterError("level must be 1 or 2", param="level")
    if state.llm.num_sequences:
        raise ApiError(409, f"{state.llm.num_sequences} sequences are running or waiting", code="busy")
    await _call(state, "sleep", int(level))
    state.asleep = True
    return json_response({"object": "sleep", "is_sleeping": True})


async def wake_up(state: ServerState, request: Request) -> Response:
    """Undo /sleep."""
    check_admin(state, request)
    await _call(state, "wake_up")
    state.asleep = False
    return json_response({"object": "sleep", "is_sleeping": False})


async def is_sleeping(state: ServerState, request: Request) -> Response:
    check_admin(state, request)
    return json_response({"object": "sleep", "is_sleeping": bool(await _call(state, "is_sleeping"))})


async def _call(state: ServerState, method: str, *arguments: Any) -> Any:
    """A method that not every engine and device has; 501 where it is missing."""
    try:
        return await state.llm.client.call(method, *arguments)
    except EngineDeadError:
        raise
    except Exception as error:
        raise ApiError(501, f"this engine or its device cannot do that: {error}", code="not_supported") from error
