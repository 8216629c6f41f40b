"""Errors as responses: one envelope, {"error": {"message", "type", "param", "code"}}, for everything that can go
wrong."""

from __future__ import annotations

from typing import Any

import msgspec
from starlette.exceptions import HTTPException

from enginecore.errors import EngineDeadError, ParameterError, QueueFullError, RequestError

JSON = "application/json"

_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    413: "invalid_request_error",
    415: "invalid_request_error",
    429: "rate_limit_error",
    431: "invalid_request_error",
    500: "server_error",
    503: "service_unavailable_error",
}
_CODES = {
    400: "invalid_value",
    404: "not_found",
    405: "method_not_allowed",
    415: "unsupported_media_type",
    500: "internal_error",
    503: "unavailable",
}


#: Paths whose clients expect Anthropic's envelope.
ANTHROPIC_PATH = "/v1/messages"
_ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


class ApiError(Exception):
    """An answer with an error envelope."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code or _CODES.get(status)
        self.headers = headers or {}

    def envelope(self) -> dict[str, Any]:
        kind = _TYPES.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    def body(self) -> bytes:
        """The envelope as JSON."""
        return msgspec.json.encode(self.envelope())

    def anthropic_body(self, request_id: str) -> bytes:
        """Anthropic's envelope as JSON. It has no place for the field's name, which the message has."""
        kind = _ANTHROPIC_TYPES.get(self.status, "api_error" if self.status >= 500 else "invalid_request_error")
        error = {"type": kind, "message": self.message}
        return msgspec.json.encode({"type": "error", "error": error, "request_id": request_id})

    def body_for(self, path: str, request_id: str) -> bytes:
        """The envelope that clients of a path expect."""
        anthropic = path == ANTHROPIC_PATH or path.startswith(ANTHROPIC_PATH + "/")
        return self.anthropic_body(request_id) if anthropic else self.body()


class ClientGone(Exception):
    """The client has hung up; there is nobody to answer."""


class ShuttingDownError(Exception):
    """The server is stopping and can no longer wait for this request."""


def as_api_error(error: Exception) -> ApiError | None:
    """The answer that an exception stands for, None for one that nobody expected."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, ParameterError):
        return ApiError(400, str(error), param=error.param, code=error.code)
    if isinstance(error, RequestError):
        return ApiError(400, str(error), param="prompt", code="request_refused")
    if isinstance(error, QueueFullError):
        headers = {"Retry-After": str(error.retry_after)}
        return ApiError(429, str(error), code="queue_full", headers=headers)
    if isinstance(error, EngineDeadError):
        return ApiError(500, str(error), code="engine_dead")
    if isinstance(error, ShuttingDownError):
        return ApiError(503, "the server is shutting down", code="shutting_down", headers={"Retry-After": "5"})
    if isinstance(error, HTTPException):
        headers = dict(error.headers or {})
        return ApiError(error.status_code, error.detail, headers=headers)
    return None
