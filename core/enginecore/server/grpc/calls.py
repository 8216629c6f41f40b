"""What stands before every gRPC method, as the gate does before every HTTP route: request ids, keys, limits, errors as
statuses, and a line in the log and the audit. Nothing but the health service is open without a key."""

from __future__ import annotations

import logging
import re
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing, asynccontextmanager
from typing import Any

import grpc
from google.protobuf.json_format import MessageToJson
from google.protobuf.message import Message

from enginecore.adapters import AdapterKey
from enginecore.frontend.tenancy import current_tenant
from enginecore.server.errors import ApiError, as_api_error
from enginecore.server.gate import Gate
from enginecore.server.keys import Client, Tally
from enginecore.server.state import ServerState

logger = logging.getLogger("enginecore.server")

OPEN = "/grpc.health.v1.Health/"
#: Looked at, not worked for: no place in the limits, and shutting down does not wait for them.
FREE = ("/grpc.reflection.",)

_REQUEST_ID = re.compile(r"[\x21-\x7e]{1,128}")
_CODES = {
    400: grpc.StatusCode.INVALID_ARGUMENT,
    401: grpc.StatusCode.UNAUTHENTICATED,
    403: grpc.StatusCode.PERMISSION_DENIED,
    404: grpc.StatusCode.NOT_FOUND,
    409: grpc.StatusCode.FAILED_PRECONDITION,
    413: grpc.StatusCode.RESOURCE_EXHAUSTED,
    429: grpc.StatusCode.RESOURCE_EXHAUSTED,
    501: grpc.StatusCode.UNIMPLEMENTED,
    503: grpc.StatusCode.UNAVAILABLE,
}
_BY_CODE = {
    "engine_dead": grpc.StatusCode.UNAVAILABLE,
    "model_does_not_generate": grpc.StatusCode.UNIMPLEMENTED,
    "model_does_not_pool": grpc.StatusCode.UNIMPLEMENTED,
}
#: Statuses that are the server's fault.
_OURS = frozenset({"INTERNAL", "UNAVAILABLE"})


class Call:
    """One call: under which id, who asks (once that is known), and the tokens that it has cost."""

    def __init__(self, state: ServerState, details: grpc.HandlerCallDetails, context: grpc.aio.ServicerContext) -> None:
        self.state = state
        self.method: str = details.method
        self._context = context
        self.headers = {_bytes(name).lower(): _bytes(value) for name, value in details.invocation_metadata or ()}
        given = self.headers.get(b"x-request-id", b"").decode("latin-1")
        self.request_id = given if _REQUEST_ID.fullmatch(given) else uuid.uuid4().hex
        self.client: Client | None = None
        self.tally = Tally(None)
        self.fingerprint_id = state.fingerprint_id()
        context.set_trailing_metadata(self.tags)

    @property
    def tags(self) -> tuple[tuple[str, str], ...]:
        """The trailing metadata of every answer."""
        return ("x-request-id", self.request_id), ("x-system-fingerprint", self.fingerprint_id)

    def choose_adapter(self, model: str) -> AdapterKey | None:
        """The adapter that a request's model names, None for the model itself; the answer's fingerprint is then its."""
        adapter = self.state.adapter_of(model or None)
        if adapter is not None:
            self.fingerprint_id = self.state.fingerprint_id(adapter)
            self._context.set_trailing_metadata(self.tags)
        return adapter

    def identify(self) -> Client:
        """Who is calling? ApiError 401 for nobody known."""
        self.client = self.state.keys.find(self.headers)
        self.tally = Tally(self.client)
        current_tenant.set(self.client.name if len(self.state.keys.names()) > 1 else None)
        return self.client


class Guard(grpc.aio.ServerInterceptor):  # type: ignore[misc]  # grpcio has no types
    """Wraps every method but the health service's. Handlers get a `Call` in place of the context."""

    def __init__(self, gate: Gate) -> None:
        self._gate = gate

    async def intercept_service(
        self, continuation: Callable[[Any], Awaitable[Any]], details: grpc.HandlerCallDetails
    ) -> Any:
        """The handler of a call, behind the guard. None, which is UNIMPLEMENTED, for an unknown method."""
        handler = await continuation(details)
        if handler is None or details.method.startswith(OPEN):
            return handler
        if handler.response_streaming:
            make = grpc.stream_stream_rpc_method_handler if handler.request_streaming else None
            make = make or grpc.unary_stream_rpc_method_handler
            behaviour: Any = self._streaming(details, handler.stream_stream or handler.unary_stream)
        else:
            make = grpc.unary_unary_rpc_method_handler
            behaviour = self._unary(details, handler.unary_unary)
        return make(behaviour, handler.request_deserializer, handler.response_serializer)

    def _unary(self, details: grpc.HandlerCallDetails, inner: Any) -> Any:
        async def run(request: Any, context: grpc.aio.ServicerContext) -> Any:
            async with self._guarded(details, context, request) as call:
                return await inner(request, call)

        return run

    def _streaming(self, details: grpc.HandlerCallDetails, inner: Any) -> Any:
        async def run(request: Any, context: grpc.aio.ServicerContext) -> None:
            guarded = self._guarded(details, context, request)
            async with guarded as call, aclosing(inner(request, call)) as answers:
                async for answer in answers:
                    await context.write(answer)

        return run

    @asynccontextmanager
    async def _guarded(
        self, details: grpc.HandlerCallDetails, context: grpc.aio.ServicerContext, request: Any
    ) -> AsyncIterator[Call]:
        gate, begun = self._gate, time.monotonic()
        status, call = "CANCELLED", Call(gate.state, details, context)
        free = details.method.startswith(FREE)
        gate.state.in_flight += not free
        try:
            try:
                client = call.identify()
                if free:
                    yield call
                else:
                    gate.state.check_ready()
                    if gate.tracer is not None:
                        call.tally.span = gate.tracer.start(call.method, call.headers, call.request_id, rpc=True)
                    with client.admit():
                        yield call
                status = "OK"
            except Exception as error:
                answer = as_api_error(error)
                if answer is None:
                    logger.exception("%s failed", call.request_id)
                    answer = ApiError(500, "internal error")
                code = code_of(answer)
                status = code.name
                await context.abort(code, answer.message, (*call.tags, *_told(answer)))
        finally:
            gate.state.in_flight -= not free
            if call.tally.span is not None:
                call.tally.span.end(call.tally, status, None if status == "OK" else status, ours=status in _OURS)
            gate.log(_record(call, context.peer(), status, time.monotonic() - begun), self._body(request))

    def _body(self, request: Any) -> bytes:
        """The request as JSON, where the audit is to have it."""
        audited = self._gate.audit is not None and self._gate.audit.with_bodies
        return MessageToJson(request, indent=None).encode() if audited and isinstance(request, Message) else b""


def code_of(error: ApiError) -> grpc.StatusCode:
    """The status that an HTTP answer stands for."""
    if error.code in _BY_CODE:
        return _BY_CODE[error.code]
    return _CODES.get(error.status, grpc.StatusCode.INTERNAL if error.status >= 500 else _CODES[400])


def _told(error: ApiError) -> list[tuple[str, str]]:
    """What else there is to say of an error. Metadata are ASCII."""
    found = {"x-error-code": error.code, "x-error-param": error.param, "retry-after": error.headers.get("Retry-After")}
    return [(name, value.encode("ascii", "replace").decode()) for name, value in found.items() if value]


def _record(call: Call, peer: str, status: str, seconds: float) -> dict[str, Any]:
    """As the gate's: what happened, without what was said."""
    return {
        "request_id": call.request_id,
        "client": call.client.name if call.client is not None else None,
        "address": peer,
        "method": "gRPC",
        "path": call.method,
        "status": status,
        "ms": round(seconds * 1000, 1),
        "prompt_tokens": call.tally.prompt,
        "generated_tokens": call.tally.generated,
    }


def _bytes(value: str | bytes) -> bytes:
    return value.encode("latin-1", "replace") if isinstance(value, str) else value
