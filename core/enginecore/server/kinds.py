"""Which routes fit the model that is served: one that generates text, or one for pooling. The others say so."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from enginecore.server.errors import ApiError
from enginecore.server.state import ServerState

Handler = Callable[[ServerState, Request], Awaitable[Any]]

#: Routes that end in generated text, or serve it.
GENERATING = frozenset(
    {"/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/responses", "/v1/cache/pin"}
)  # fmt: skip
#: Routes that end in numbers.
POOLING = frozenset(
    {"/v1/embeddings", "/v1/rerank", "/rerank", "/v2/rerank", "/v1/score", "/score", "/classify", "/pooling"}
)


def fitting(state: ServerState, method: str, path: str, handler: Handler) -> Handler:
    """The handler of a route, or one that refuses with the way out."""
    pools = state.llm.config.pooling is not None
    if method == "POST" and pools and path in GENERATING:
        return _refuse_generation
    if method == "POST" and not pools and path in POOLING:
        return _refuse_pooling
    return handler


async def _refuse_generation(state: ServerState, request: Request) -> Response:
    check_generates(state)
    raise AssertionError("it generates")


async def _refuse_pooling(state: ServerState, request: Request) -> Response:
    check_pools(state)
    raise AssertionError("it pools")


def check_generates(state: ServerState) -> None:
    """ApiError where the model is one for pooling."""
    model = state.llm.config.pooling
    if model is None:
        return
    routes = "/classify, /v1/score or /v1/rerank" if "classify" in model.tasks else "/v1/embeddings, /v1/score, ..."
    raise ApiError(
        400,
        f"the model {state.model_name!r} is for pooling and generates no text; ask at {routes}, or serve a model that "
        "generates (with --runner generate, if it could do either)",
        param="model",
        code="model_does_not_generate",
    )


def check_pools(state: ServerState) -> None:
    """ApiError where the model generates text."""
    if state.llm.config.pooling is not None:
        return
    raise ApiError(
        400,
        f"the model {state.model_name!r} is served to generate text and gives no vectors; serve an embedding model, or "
        "this one with --runner pooling",
        param="model",
        code="model_does_not_pool",
    )
