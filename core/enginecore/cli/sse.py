"""A small client of OpenAI-compatible servers: which model it serves, and streams of server-sent events."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import httpx

from enginecore.errors import EngineCoreError


class ServerReplyError(EngineCoreError):
    """The server refused, or its answer broke off."""


def headers_for(api_key: str | None) -> dict[str, str]:
    return {"Authorization": f"Bearer {api_key}"} if api_key else {}


def base_url(url: str) -> str:
    """`url` without a trailing slash or /v1, so that both forms that people copy work."""
    return url.rstrip("/").removesuffix("/v1")


async def first_model(client: httpx.AsyncClient, url: str) -> str:
    """The first model that the server lists."""
    try:
        reply = await client.get(f"{url}/v1/models")
        if reply.status_code != 200:
            raise ServerReplyError(_refusal(reply.status_code, reply.content), fix=_fix(reply.status_code))
        name: str = reply.json()["data"][0]["id"]
    except httpx.HTTPError as error:
        raise ServerReplyError(f"no answer from {url}: {error!r}", fix="is the server running there?") from error
    except (ValueError, LookupError, TypeError) as error:
        raise ServerReplyError(f"{url}/v1/models does not list a model") from error
    return name


async def get_object(client: httpx.AsyncClient, address: str) -> dict[str, Any] | None:
    """The JSON object at an address; None when there is none."""
    try:
        reply = await client.get(address)
        value = reply.json() if reply.status_code == 200 else None
    except (httpx.HTTPError, ValueError):
        return None
    return value if isinstance(value, dict) else None


async def stream(client: httpx.AsyncClient, address: str, body: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
    """POST `body` and yield the JSON of each event. Raises ServerReplyError on a refusal, an error event, or a stream
    that ends without its [DONE]."""
    try:
        async with client.stream("POST", address, json=body) as reply:
            if reply.status_code != 200:
                raise ServerReplyError(_refusal(reply.status_code, await reply.aread()), fix=_fix(reply.status_code))
            async for line in reply.aiter_lines():
                if not line.startswith("data:"):
                    continue
                data = line[5:].strip()
                if data == "[DONE]":
                    return
                event = json.loads(data)
                if "error" in event:
                    raise ServerReplyError(f"the server reports: {_message(event)}")
                yield event
    except httpx.HTTPError as error:
        raise ServerReplyError(f"the connection to {address} failed: {error!r}") from error
    except ValueError as error:
        raise ServerReplyError(f"{address} sent something that is not JSON: {error}") from error
    raise ServerReplyError(f"{address} ended its stream without saying so")


def _refusal(status: int, content: bytes) -> str:
    try:
        text = _message(json.loads(content))
    except (ValueError, AttributeError):
        text = content[:200].decode("utf-8", "replace")
    return f"the server answered {status}: {text}"


def _message(envelope: Any) -> str:
    error = envelope.get("error") if isinstance(envelope, dict) else None
    return str(error.get("message") if isinstance(error, dict) else error or envelope)


def _fix(status: int) -> str | None:
    return "give its key with --api-key or ENGINECORE_API_KEY" if status in (401, 403) else None
