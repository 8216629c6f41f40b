"""Routes for operators that load and unload adapters while the server runs, under vLLM's names and with its fields.

An adapter is read from a folder under `--lora-root` and from nowhere else; without that folder the routes are closed.
"""

from __future__ import annotations

import asyncio

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from enginecore.adapters import AdapterInfo, check_adapter_name
from enginecore.errors import EngineCoreError, EngineDeadError, ParameterError
from enginecore.server.admin import check_admin
from enginecore.server.body import check_fields, convert, read_object
from enginecore.server.errors import ApiError
from enginecore.server.generation import json_response
from enginecore.server.protocol import field_names
from enginecore.server.state import ServerState


class LoadAdapterRequest(msgspec.Struct, kw_only=True):
    """`lora_path` is a folder under the server's folder for adapters. `load_inplace` replaces an adapter of that name;
    requests that have it keep it."""

    lora_name: str
    lora_path: str
    load_inplace: bool = False


class UnloadAdapterRequest(msgspec.Struct, kw_only=True):
    lora_name: str
    lora_int_id: int | None = None


def adapter_object(state: ServerState, info: AdapterInfo) -> dict[str, object]:
    """What is told of a loaded adapter."""
    told = {"object": "lora_adapter", "lora_name": info.name, "rank": info.rank, "modules": info.num_modules}
    return told | {"sha256": info.sha256, "parent": state.model_name, "fingerprint": state.fingerprint_id(info.key)}


async def load_adapter(state: ServerState, request: Request) -> Response:
    """Read an adapter and serve it under a name. Requests in flight go on meanwhile; whatever is wrong with the files
    changes nothing."""
    _check_open(state, request)
    raw = await read_object(request)
    strict = state.args.strict_fields
    check_fields(raw, field_names(LoadAdapterRequest), {}, strict=strict, request_id=request.state.request_id)
    body = convert(raw, LoadAdapterRequest)
    check_adapter_name(body.lora_name)
    if state.llm.adapters.get(body.lora_name) is not None and not body.load_inplace:
        told = f"the adapter {body.lora_name!r} is loaded already; unload it first, or set load_inplace"
        raise ParameterError(told, param="lora_name")
    # Not to be left half done when the client hangs up.
    info: AdapterInfo = await asyncio.shield(asyncio.ensure_future(_load(state, body)))
    return json_response(adapter_object(state, info))


async def _load(state: ServerState, body: LoadAdapterRequest) -> AdapterInfo:
    try:
        return await state.llm.load_adapter(body.lora_name, body.lora_path, in_place=body.load_inplace)
    except (EngineDeadError, ParameterError):
        raise
    except EngineCoreError as error:
        raise ApiError(400, str(error), param="lora_path", code="adapter_refused") from error


async def unload_adapter(state: ServerState, request: Request) -> Response:
    """Stop serving an adapter. Requests that have it end with it, and its memory is free after the last of them."""
    _check_open(state, request)
    raw = await read_object(request)
    strict = state.args.strict_fields
    check_fields(raw, field_names(UnloadAdapterRequest), {}, strict=strict, request_id=request.state.request_id)
    body = convert(raw, UnloadAdapterRequest)
    if state.llm.adapters.get(body.lora_name) is None:
        told = f"there is no adapter {body.lora_name[:128]!r}"
        raise ApiError(404, told, param="lora_name", code="adapter_not_found")
    left = await state.llm.unload_adapter(body.lora_name)
    return json_response({"object": "lora_adapter.unloaded", "lora_name": body.lora_name, "sequences_in_flight": left})


def _check_open(state: ServerState, request: Request) -> None:
    check_admin(state, request)
    config = state.llm.config
    if not config.enable_lora:
        raise ApiError(403, "this server serves no adapters: start it with --enable-lora", code="adapters_off")
    if config.lora_root is None:
        raise ApiError(403, "adapters are loaded from one folder only: name it with --lora-root", code="no_lora_root")
