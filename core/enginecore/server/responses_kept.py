"""Routes of responses that are kept: GET and DELETE /v1/responses/{id}, POST .../cancel, GET .../input_items."""

from __future__ import annotations

import asyncio
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp

from enginecore.errors import ParameterError
from enginecore.server.generation import json_response
from enginecore.server.responses import owner_of
from enginecore.server.responses_store import Stored
from enginecore.server.state import ServerState
from enginecore.server.turn import open_stream

MAX_PAGE = 100


def _find(state: ServerState, request: Request) -> Stored:
    return state.responses.get(request.path_params["response_id"], owner_of(request))


async def retrieve(state: ServerState, request: Request) -> Response | ASGIApp:
    """The response. With ?stream=true the events of one that was made in the background, from the start or from
    behind ?starting_after."""
    stored = _find(state, request)
    if request.query_params.get("stream", "false") != "true":
        return json_response(stored.response)
    if stored.events is None:
        raise ParameterError("only a response made in the background can be streamed afterwards", param="stream")
    after = _number(request, "starting_after", -1, low=-1)
    if stored.ended and after + 1 >= len(stored.events):
        raise ParameterError("there are no events behind starting_after", param="starting_after")
    return await open_stream(request, stored.follow(after), lambda error: b"")


async def delete(state: ServerState, request: Request) -> Response:
    response_id: str = request.path_params["response_id"]
    state.responses.delete(response_id, owner_of(request))
    return json_response({"id": response_id, "object": "response", "deleted": True})


async def cancel(state: ServerState, request: Request) -> Response:
    """End a response that runs in the background. One that has ended stays as it is."""
    stored = _find(state, request)
    if not stored.response["background"]:
        raise ParameterError("only a response in the background can be cancelled", param="response_id")
    if stored.task is not None:
        stored.task.cancel()
        await asyncio.wait({stored.task})
        await asyncio.sleep(0)  # what is called when it is done has then run
    return json_response(stored.response)


async def input_items(state: ServerState, request: Request) -> Response:
    """What the response answers, earlier turns included; newest first unless ?order=asc."""
    items = _find(state, request).items
    order = request.query_params.get("order", "desc")
    if order not in ("asc", "desc"):
        raise ParameterError("order must be asc or desc", param="order")
    limit = _number(request, "limit", 20, low=1, high=MAX_PAGE)
    page: list[dict[str, Any]] = items if order == "asc" else items[::-1]
    after = request.query_params.get("after")
    if after is not None:
        place = next((index for index, item in enumerate(page) if item["id"] == after), None)
        if place is None:
            raise ParameterError(f"after: there is no item {after[:128]!r}", param="after")
        page = page[place + 1 :]
    data = page[:limit]
    ends = {"first_id": data[0]["id"] if data else "", "last_id": data[-1]["id"] if data else ""}
    return json_response({"object": "list", "data": data, **ends, "has_more": len(page) > len(data)})


def _number(request: Request, name: str, default: int, *, low: int, high: int = 2**31) -> int:
    given = request.query_params.get(name)
    if given is None:
        return default
    if not given.lstrip("-").isascii() or not given.lstrip("-").isdigit() or len(given) > 12:
        raise ParameterError(f"{name} must be a number", param=name)
    if not low <= int(given) <= high:
        raise ParameterError(f"{name} must be between {low} and {high}, got {given}", param=name)
    return int(given)
