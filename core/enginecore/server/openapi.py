"""The OpenAPI document, served at /openapi.json: routes from the application's table, bodies from the wire schemas."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from enginecore._version import __version__
from enginecore.pooling import MAX_DIMENSIONS, POOLING_TASKS
from enginecore.request import INT32_MAX, INT64_MAX, INT64_MIN, MAX_N, MAX_STOP_STRINGS
from enginecore.server import lora, messages_protocol, pins, pooling_protocol, protocol, responses_protocol
from enginecore.server.errors import ANTHROPIC_PATH, JSON
from enginecore.server.gate import OPEN_PATHS
from enginecore.server.generation import json_response
from enginecore.server.state import ServerState
from enginecore.server.turn import EXTRA_FIELDS

#: Path -> the schema of a POST's body. A POST that is not here takes none.
BODIES: dict[str, type[msgspec.Struct]] = {
    "/v1/chat/completions": protocol.ChatRequest,
    "/v1/completions": protocol.CompletionRequest,
    "/v1/messages": messages_protocol.MessagesRequest,
    "/v1/messages/count_tokens": messages_protocol.CountTokensRequest,
    "/v1/responses": responses_protocol.ResponsesRequest,
    "/v1/responses/input_tokens": responses_protocol.ResponsesRequest,
    "/v1/embeddings": pooling_protocol.EmbeddingRequest,
    "/v1/rerank": pooling_protocol.RerankRequest,
    "/rerank": pooling_protocol.RerankRequest,
    "/v2/rerank": pooling_protocol.RerankRequest,
    "/v1/score": pooling_protocol.ScoreRequest,
    "/score": pooling_protocol.ScoreRequest,
    "/classify": pooling_protocol.ClassifyRequest,
    "/pooling": pooling_protocol.PoolingRequest,
    "/v1/cache/pin": pins.PinRequest,
    "/v1/cache/unpin": pins.UnpinRequest,
    "/v1/load_lora_adapter": lora.LoadAdapterRequest,
    "/v1/unload_lora_adapter": lora.UnloadAdapterRequest,
    "/tokenize": protocol.TokenizeRequest,
    "/detokenize": protocol.DetokenizeRequest,
}
_STREAMED = frozenset({"/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/responses"})
_WITH_EXTRAS = frozenset({"MessagesRequest", "ResponsesRequest"})

_INTEGER: dict[str, Any] = {"type": "integer"}
_TOKENS = {"type": "array", "items": {"type": "integer", "minimum": 0}}
_QUERY: dict[tuple[str, str], dict[str, dict[str, Any]]] = {
    ("GET", "/v1/responses/{response_id}"): {
        "stream": {"type": "boolean"},
        "starting_after": {"type": "integer", "minimum": -1},
    },
    ("GET", "/v1/responses/{response_id}/input_items"): {
        "order": {"type": "string", "enum": ["asc", "desc"]},
        "limit": {"type": "integer", "minimum": 1, "maximum": 100},
        "after": {"type": "string"},
    },
    ("POST", "/sleep"): {"level": {"type": "integer", "enum": [1, 2]}},
}

_PART = {
    "type": "object",
    "properties": {"type": {"type": "string", "enum": ["text"]}, "text": {"type": "string"}},
    "required": ["type", "text"],
}
_CONTENT = {"oneOf": [{"type": "string"}, {"type": "array", "items": _PART}]}
_MESSAGE = {
    "type": "object",
    "properties": {
        "role": {"type": "string", "enum": ["system", "developer", "user", "assistant", "tool"]},
        "content": _CONTENT,
        "name": {"type": "string"},
        "tool_call_id": {"type": "string"},
        "tool_calls": {"type": "array", "items": {"type": "object"}},
    },
    "required": ["role"],
}
_MESSAGES = {"type": "array", "items": _MESSAGE, "minItems": 1}
_TEXTS = {
    "oneOf": [{"type": "string", "minLength": 1}, {"type": "array", "items": {"type": "string"}, "minItems": 1},
              {**_TOKENS, "minItems": 1}, {"type": "array", "items": _TOKENS, "minItems": 1}],
}  # fmt: skip
_DOCUMENT = {
    "oneOf": [{"type": "string", "minLength": 1}, {"type": "object", "properties": {"text": {"type": "string"}},
                                                  "required": ["text"]}],
}  # fmt: skip
#: As `_REFINED`, for the schemas of pooling.
_REFINED_POOLING: dict[str, dict[str, Any]] = {
    "input": _TEXTS,
    "text_1": _TEXTS,
    "text_2": _TEXTS,
    "query": {"type": "string", "minLength": 1},
    "documents": {"type": "array", "items": _DOCUMENT, "minItems": 1},
    "task": {"type": "string", "enum": list(POOLING_TASKS)},
    "dimensions": {**_INTEGER, "minimum": 1, "maximum": MAX_DIMENSIONS},
    "top_n": {**_INTEGER, "minimum": 0},
}
_POOLING_SCHEMAS = frozenset(schema.__name__ for schema in BODIES.values() if issubclass(schema, pooling_protocol.
                             PoolingFields))  # fmt: skip

#: What the wire schemas leave to later checks, by field.
_REFINED: dict[str, dict[str, Any]] = {
    "messages": _MESSAGES,
    "prompt": {
        "oneOf": [{"type": "string", "minLength": 1}, {"type": "array", "items": {"type": "string"}, "minItems": 1},
                  {**_TOKENS, "minItems": 1}, {"type": "array", "items": _TOKENS, "minItems": 1}],
    },
    "tool_choice": {"oneOf": [{"type": "string", "enum": ["none", "auto", "required"]}, {"type": "object"}]},
    "n": {**_INTEGER, "minimum": 1, "maximum": MAX_N},
    "best_of": {**_INTEGER, "minimum": 1, "maximum": MAX_N},
    "temperature": {"type": "number", "minimum": 0},
    "top_p": {"type": "number", "exclusiveMinimum": 0, "maximum": 1},
    "min_p": {"type": "number", "minimum": 0, "maximum": 1},
    "top_k": {**_INTEGER, "minimum": -1, "maximum": INT32_MAX},
    "presence_penalty": {"type": "number", "minimum": -2, "maximum": 2},
    "frequency_penalty": {"type": "number", "minimum": -2, "maximum": 2},
    "repetition_penalty": {"type": "number", "exclusiveMinimum": 0},
    "seed": {**_INTEGER, "minimum": INT64_MIN, "maximum": INT64_MAX},
    "max_tokens": {**_INTEGER, "minimum": 0, "maximum": INT32_MAX},
    "max_completion_tokens": {**_INTEGER, "minimum": 1, "maximum": INT32_MAX},
    "max_output_tokens": {**_INTEGER, "minimum": 1, "maximum": INT32_MAX},
    "min_tokens": {**_INTEGER, "minimum": 0, "maximum": INT32_MAX},
    "stop_token_ids": _TOKENS,
    "allowed_token_ids": {**_TOKENS, "minItems": 1},
    "logit_bias": {"type": "object", "additionalProperties": {"type": "number", "minimum": -100, "maximum": 100}},
    "bad_words": {"type": "array", "items": {"type": "string", "minLength": 1}, "maxItems": MAX_STOP_STRINGS},
    "cache_salt": {"type": "string", "minLength": 1},
    "logprobs": {"oneOf": [{"type": "boolean"}, {**_INTEGER, "minimum": 0}]},
}  # fmt: skip


Handler = Callable[..., Any]


def document(routes: Iterable[tuple[str, str, Handler]]) -> dict[str, Any]:
    """The OpenAPI 3.1 document of (method, path, handler) rows."""
    schemas = _schemas()
    paths: dict[str, Any] = {}
    for method, path, handler in routes:
        shown = re.sub(r":path\}", "}", path)
        paths.setdefault(shown, {})[method.lower()] = _operation(method, shown, handler)
    return {
        "openapi": "3.1.0",
        "info": {"title": "enginecore", "version": __version__},
        "paths": paths,
        "components": {
            "schemas": schemas,
            "securitySchemes": {
                "bearer": {"type": "http", "scheme": "bearer"},
                "key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
            },
        },
        "security": [{"bearer": []}, {"key": []}],
    }


def _schemas() -> dict[str, Any]:
    """Components: the wire schemas, refined, and the error envelopes."""
    types = list(dict.fromkeys(BODIES.values()))
    _, found = msgspec.json.schema_components(types, ref_template="#/components/schemas/{name}")
    chat = found["ChatRequest"]["properties"]
    for name, schema in found.items():
        properties = schema.get("properties", {})
        if name in _WITH_EXTRAS:
            properties |= {field: chat[field] for field in EXTRA_FIELDS if field in chat}
        anthropic = name in ("MessagesRequest", "CountTokensRequest")
        refined = {**_REFINED, **_REFINED_POOLING} if name in _POOLING_SCHEMAS else _REFINED
        for field in properties:
            if field in refined and not (anthropic and field in ("messages", "tool_choice")):
                properties[field] = refined[field]
    found["DetokenizeRequest"]["properties"]["tokens"] = _TOKENS
    error = {name: {"type": ["string", "null"]} for name in ("message", "type", "param", "code")}
    found["Error"] = _object(error=_object(**error))
    kind, text = {"type": "string", "enum": ["error"]}, {"type": "string"}
    found["AnthropicError"] = _object(type=kind, error=_object(type=text, message=text), request_id=text)
    return found


def _object(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(properties)}


def _operation(method: str, path: str, handler: Handler) -> dict[str, Any]:
    told = inspect.getdoc(handler) or ""
    found: dict[str, Any] = {"operationId": f"{method.lower()}_{re.sub(r'[^a-z0-9]+', '_', path.strip('/'))}"}
    found["summary"] = told.partition("\n")[0] or path
    if path in OPEN_PATHS:
        found["security"] = []
    names = re.findall(r"\{(\w+)\}", path)
    parameters = [{"name": name, "in": "path", "required": True, "schema": {"type": "string"}} for name in names]
    for name, schema in _QUERY.get((method, path), {}).items():
        parameters.append({"name": name, "in": "query", "schema": schema})
    if parameters:
        found["parameters"] = parameters
    if method == "POST" and path in BODIES:
        reference = {"$ref": f"#/components/schemas/{BODIES[path].__name__}"}
        found["requestBody"] = {"required": True, "content": {JSON: {"schema": reference}}}
    content: dict[str, Any] = {JSON: {"schema": {"type": "object"}}}
    if path == "/metrics":
        content = {"text/plain": {"schema": {"type": "string"}}}
    if path in _STREAMED or path == "/v1/responses/{response_id}":
        content["text/event-stream"] = {"schema": {"type": "string"}}
    envelope = "AnthropicError" if path.startswith(ANTHROPIC_PATH) else "Error"
    refusal = {JSON: {"schema": {"$ref": f"#/components/schemas/{envelope}"}}}
    found["responses"] = {
        "200": {"description": "the answer", "content": content},
        "4XX": {"description": "what is wrong with the request", "content": refusal},
        "5XX": {"description": "what is wrong with the server", "content": refusal},
    }
    return found


def describing(routes: Iterable[tuple[str, str, Handler]]) -> Handler:
    """The handler of GET /openapi.json for these routes and itself."""

    async def openapi(state: ServerState, request: Request) -> Response:
        """This document."""
        return json_response(document([*routes, ("GET", "/openapi.json", openapi)]))

    return openapi
