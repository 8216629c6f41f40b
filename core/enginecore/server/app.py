"""The ASGI application: routes, behind the gate, behind CORS where it is wanted."""

from __future__ import annotations

import functools
from collections.abc import Awaitable, Callable
from typing import Any

from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.routing import Route, Router
from starlette.types import ASGIApp, Receive, Scope, Send

from enginecore.frontend.async_llm import AsyncLLM
from enginecore.server import account, admin, embeddings, info, lora, pins, rerank, responses, responses_kept
from enginecore.server.args import ServerArgs
from enginecore.server.chat import chat_completions
from enginecore.server.completions import completions
from enginecore.server.errors import ApiError
from enginecore.server.gate import Gate
from enginecore.server.kinds import fitting
from enginecore.server.messages import count_tokens, messages
from enginecore.server.openapi import describing
from enginecore.server.state import ServerState
from enginecore.server.tokens import detokenize, tokenize

#: As EngineArgs.max_waiting, for apps made without engine settings at hand.
DEFAULT_MAX_WAITING = 1024

Handler = Callable[[ServerState, Request], Awaitable[Any]]

_ROUTES: tuple[tuple[str, str, Handler], ...] = (
    ("POST", "/v1/chat/completions", chat_completions),
    ("POST", "/v1/completions", completions),
    ("POST", "/v1/messages", messages),
    ("POST", "/v1/messages/count_tokens", count_tokens),
    ("POST", "/v1/responses", responses.create),
    ("POST", "/v1/responses/input_tokens", responses.input_tokens),
    ("GET", "/v1/responses/{response_id}", responses_kept.retrieve),
    ("DELETE", "/v1/responses/{response_id}", responses_kept.delete),
    ("POST", "/v1/responses/{response_id}/cancel", responses_kept.cancel),
    ("GET", "/v1/responses/{response_id}/input_items", responses_kept.input_items),
    ("POST", "/v1/embeddings", embeddings.embeddings),
    ("POST", "/v1/rerank", rerank.rerank),
    ("POST", "/rerank", rerank.rerank),
    ("POST", "/v2/rerank", rerank.rerank),
    ("POST", "/v1/score", rerank.score),
    ("POST", "/score", rerank.score),
    ("POST", "/classify", embeddings.classify),
    ("POST", "/pooling", embeddings.pooling),
    ("GET", "/v1/models", info.models),
    ("GET", "/v1/models/{model:path}", info.model),
    ("GET", "/v1/fingerprint", info.fingerprint),
    ("GET", "/v1/fingerprint/{fingerprint_id}", info.fingerprint_by_id),
    ("GET", "/v1/memory", account.memory),
    ("GET", "/v1/requests/{request_id:path}/explain", account.explain),
    ("POST", "/v1/cache/pin", pins.pin),
    ("POST", "/v1/cache/unpin", pins.unpin),
    ("GET", "/v1/cache/pins", pins.pins),
    ("POST", "/v1/load_lora_adapter", lora.load_adapter),
    ("POST", "/v1/unload_lora_adapter", lora.unload_adapter),
    ("POST", "/tokenize", tokenize),
    ("POST", "/detokenize", detokenize),
    ("GET", "/health", info.health),
    ("GET", "/ping", info.health),
    ("POST", "/ping", info.health),
    ("GET", "/version", info.version),
    ("GET", "/load", info.load),
    ("GET", "/server_info", admin.server_info),
    ("POST", "/sleep", admin.sleep),
    ("POST", "/wake_up", admin.wake_up),
    ("GET", "/is_sleeping", admin.is_sleeping),
    ("GET", "/metrics", info.metrics),
    ("POST", "/reset_prefix_cache", admin.reset_prefix_cache),
)


ROUTES = (*_ROUTES, ("GET", "/openapi.json", describing(_ROUTES)))


class App:
    """The application. `state` is what the routes share, `gate` stands before them; `routes` are (method, path,
    handler)."""

    routes = ROUTES

    def __init__(self, app: ASGIApp, gate: Gate) -> None:
        self._app = app
        self.gate = gate
        self.state = gate.state

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._app(scope, receive, send)


def create_app(llm: AsyncLLM, args: ServerArgs | None = None, *, max_waiting: int = DEFAULT_MAX_WAITING) -> App:
    """The server's application over a running engine. `max_waiting` counts where `args` leaves it open."""
    args = args or ServerArgs()
    limit = args.max_waiting if args.max_waiting is not None else max_waiting
    state = ServerState(llm, args, limit)
    methods: dict[str, dict[str, Handler]] = {}
    for method, path, handler in ROUTES:
        methods.setdefault(path, {})[method] = fitting(state, method, path, handler)
    routes = [Route(path, _Endpoint(state, handlers)) for path, handlers in methods.items()]
    gate = Gate(Router(routes, redirect_slashes=False, default=_unknown_path), state)
    app: ASGIApp = gate
    if args.cors_origins:
        app = CORSMiddleware(
            app,
            allow_origins=list(args.cors_origins),
            allow_methods=["GET", "POST", "DELETE"],
            allow_headers=["*"],
            expose_headers=["x-request-id", "x-system-fingerprint"],
        )
    return App(app, gate)


class _Endpoint:
    """One path as an ASGI application (a class, so that the router hands every method to it)."""

    def __init__(self, state: ServerState, handlers: dict[str, Handler]) -> None:
        self._handlers = {method: functools.partial(handler, state) for method, handler in handlers.items()}
        if "GET" in self._handlers:
            self._handlers["HEAD"] = self._handlers["GET"]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        handler = self._handlers.get(scope["method"])
        if handler is None:
            allowed = ", ".join(sorted(self._handlers))
            raise ApiError(405, f"the method must be one of {allowed}", headers={"Allow": allowed})
        response = await handler(Request(scope, receive, send))
        await response(scope, receive, send)


async def _unknown_path(scope: Scope, receive: Receive, send: Send) -> None:
    raise HTTPException(404, "there is no such path")
