"""Routes for operators about pinned prefixes: POST /v1/cache/pin, POST /v1/cache/unpin, GET /v1/cache/pins."""

from __future__ import annotations

import math
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from enginecore.errors import ParameterError
from enginecore.frontend.input_processor import MAX_CACHE_SALT_CHARS
from enginecore.server.admin import check_admin
from enginecore.server.body import check_fields, convert, read_object
from enginecore.server.errors import ApiError
from enginecore.server.generation import json_response
from enginecore.server.protocol import UNSUPPORTED_TOKENIZE, TokenizeRequest, field_names
from enginecore.server.sse import unless_gone
from enginecore.server.state import ServerState
from enginecore.server.tokens import encode_prompt

#: Seconds; a pin for ever would outlive whoever remembers it.
MAX_TTL = 30 * 86_400.0


class PinRequest(TokenizeRequest, kw_only=True):
    """The beginning of prompts to come: `prompt` as text or token ids, or `messages`. `ttl` is in seconds."""

    prompt: Any = None
    ttl: float = 3600.0
    cache_salt: str | None = None


class UnpinRequest(msgspec.Struct, kw_only=True):
    id: str


async def pin(state: ServerState, request: Request) -> Response:
    """Keep the full blocks of a prefix cached, from now on or from when they are computed. The same prefix again begins
    the time anew."""
    check_admin(state, request)
    raw = await read_object(request)
    ids, body = await unless_gone(request, state.llm.off_loop(_check, state, raw, request.state.request_id))
    block_size = state.llm.config.block_size
    if len(ids) < block_size:
        raise ParameterError(f"a prefix of {len(ids)} tokens fills no block of {block_size}", param="prompt")
    told = await state.llm.client.call("pin", ids, body.ttl, body.cache_salt)
    if told is None:
        raise ApiError(409, "more than half of the cache would be pinned; unpin something first", code="too_many_pins")
    return json_response({"object": "cache.pin", **told})


async def unpin(state: ServerState, request: Request) -> Response:
    """End a pin at once; its blocks stay cached like any others."""
    check_admin(state, request)
    raw = await read_object(request)
    strict = state.args.strict_fields
    check_fields(raw, field_names(UnpinRequest), {}, strict=strict, request_id=request.state.request_id)
    body = convert(raw, UnpinRequest)
    if not await state.llm.client.call("unpin", body.id):
        raise ApiError(404, "there is no such pin, or its time is over", param="id", code="pin_not_found")
    return json_response({"object": "cache.unpin", "id": body.id})


async def pins(state: ServerState, request: Request) -> Response:
    """What is pinned, by operators and by requests."""
    check_admin(state, request)
    return json_response({"object": "list", "data": await state.llm.client.call("list_pins")})


def _check(state: ServerState, raw: dict[str, Any], request_id: str) -> tuple[list[int], PinRequest]:
    """The prefix's token ids. Slow: for a thread."""
    strict = state.args.strict_fields
    check_fields(raw, field_names(PinRequest), UNSUPPORTED_TOKENIZE, strict=strict, request_id=request_id)
    body = convert(raw, PinRequest)
    state.check_model(body.model)
    if not (math.isfinite(body.ttl) and 0 < body.ttl <= MAX_TTL):
        raise ParameterError(f"ttl must be above 0 and at most {MAX_TTL:g} seconds", param="ttl")
    if body.cache_salt is not None and not 0 < len(body.cache_salt) <= MAX_CACHE_SALT_CHARS:
        told = f"cache_salt must have 1 to {MAX_CACHE_SALT_CHARS} characters"
        raise ParameterError(told, param="cache_salt")
    if (body.prompt is None) == (body.messages is None):
        raise ParameterError("give either prompt or messages", param="prompt")
    ids = _ids(state, body)
    if len(ids) > state.llm.config.max_model_len:
        raise ParameterError(
            f"the prefix has {len(ids)} tokens, more than a prompt may have", param="prompt",
            code="context_length_exceeded",
        )  # fmt: skip
    return ids, body


def _ids(state: ServerState, body: PinRequest) -> list[int]:
    if not isinstance(body.prompt, list):
        if body.prompt is not None and not isinstance(body.prompt, str):
            raise ParameterError("prompt must be text or a list of token ids", param="prompt")
        return encode_prompt(state, body)
    size = state.llm.config.vocab_size
    if not all(type(token) is int and 0 <= token < size for token in body.prompt):
        raise ParameterError(f"prompt must hold token ids from 0 to {size - 1}", param="prompt")
    return body.prompt
