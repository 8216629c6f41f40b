"""A request's body: checked for type, depth and syntax, then checked against a schema. The limit on its size is the
gate's."""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Callable
from typing import Any, TypeVar

import msgspec
from starlette.requests import Request

from enginecore.errors import ParameterError
from enginecore.frontend.nesting import check_nesting
from enginecore.server.errors import ApiError

logger = logging.getLogger("enginecore.server")
S = TypeVar("S", bound=msgspec.Struct)
T = TypeVar("T")

#: Bodies above this many bytes are parsed and checked in a thread.
_LARGE = 1 << 16
_PATH = re.compile(r" - at `(?:key in )?\$\.?(.*)`$")


async def read_object(request: Request) -> dict[str, Any]:
    """The JSON object of a request. Null members are dropped: an explicit null means the default. Raises ApiError."""
    kind = request.headers.get("content-type", "application/json").split(";")[0].strip().lower()
    if kind != "application/json" and not kind.endswith("+json"):
        raise ApiError(415, "the content type must be application/json")
    body = await request.body()
    value = await asyncio.to_thread(_parse, body) if len(body) > _LARGE else _parse(body)
    if not isinstance(value, dict):
        raise ApiError(400, "the body must be a JSON object", code="invalid_json")
    return {name: member for name, member in value.items() if member is not None}


async def checked(request: Request, check: Callable[[], T]) -> T:
    """What `check` returns. It runs in a thread when the body, which was read before, is so large that going through it
    could hold up other requests."""
    large = len(await request.body()) > _LARGE
    return await asyncio.to_thread(check) if large else check()


def _parse(body: bytes) -> Any:
    if not body.strip():
        raise ApiError(400, "the body is empty; it must be a JSON object", code="invalid_json")
    check_nesting(body)
    try:
        return msgspec.json.decode(body)
    except msgspec.ValidationError as error:
        raise ApiError(400, "the body holds a number that is out of range", code="invalid_json") from error
    except msgspec.DecodeError as error:
        raise ApiError(400, f"the body is not valid JSON: {error}", code="invalid_json") from error
    except UnicodeDecodeError as error:
        raise ApiError(400, "the body is not valid UTF-8", code="invalid_json") from error
    except RecursionError as error:
        raise ApiError(400, "the JSON is nested too deep", code="nesting_too_deep") from error


def convert(value: dict[str, Any], schema: type[S]) -> S:
    """The object as `schema`; unknown members are ignored. ParameterError names the field that does not fit."""
    try:
        return msgspec.convert(value, schema, strict=True)
    except msgspec.ValidationError as error:
        text = str(error)
        found = _PATH.search(text)
        field = found.group(1).replace("[...]", "") if found else None
        message = text[: found.start()] if found else text
        message = message.replace(" | null", "")
        if field is None:
            missing = re.search(r"required field `(\w+)`", text)
            field = missing.group(1) if missing else None
        raise ParameterError(f"{field}: {message}" if field else message, param=field) from error


def check_fields(
    value: dict[str, Any],
    known: frozenset[str],
    unsupported: dict[str, tuple[Any, ...]],
    *,
    strict: bool,
    request_id: str,
) -> None:
    """Refuse fields that are known but not supported (unless they ask for nothing), and report unknown ones."""
    unknown = [name for name in value if name not in known]
    if not unknown:
        return
    for name in unknown:
        if name in unsupported and not any(value[name] == harmless for harmless in unsupported[name]):
            raise ParameterError(f"{name} is not supported", param=name, code="unsupported_parameter")
    unknown = [name for name in unknown if name not in unsupported]
    if unknown and strict:
        raise ParameterError(f"unknown field {unknown[0][:64]!r}", param=unknown[0][:64], code="unknown_parameter")
    if unknown:
        names = ", ".join(repr(name[:64]) for name in unknown[:20])
        logger.warning("%s unknown fields were ignored: %s", request_id, names)
