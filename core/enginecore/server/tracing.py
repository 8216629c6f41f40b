"""OpenTelemetry traces: one span a request, under the field's names for generative models (docs/tracing.md).

The packages are optional and only imported where `--otlp-traces-endpoint` is given. The tracer is this server's own:
nothing global is set, so that a program which embeds the server keeps its own tracing.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from enginecore._version import __version__
from enginecore.errors import EngineCoreError
from enginecore.request import SamplingParams
from enginecore.server.errors import ApiError, ClientGone, as_api_error

if TYPE_CHECKING:
    from enginecore.frontend.outputs import RequestOutput
    from enginecore.server.keys import Tally

#: gen_ai.operation.name by path; what is none of these has a span without the names of generative models.
_OPERATIONS = {
    "/v1/chat/completions": "chat",
    "/v1/messages": "chat",
    "/v1/responses": "chat",
    "/v1/completions": "text_completion",
    "/v1/embeddings": "embeddings",
    "/enginecore.v1.Inference/Generate": "text_completion",
    "/enginecore.v1.Inference/GenerateStream": "text_completion",
    "/enginecore.v1.Inference/Embed": "embeddings",
}
#: SamplingParams' name -> (the convention's name, the value that asks for nothing).
_ASKED: dict[str, tuple[str, Any]] = {
    "temperature": ("gen_ai.request.temperature", None),
    "top_p": ("gen_ai.request.top_p", None),
    "top_k": ("gen_ai.request.top_k", 0),
    "max_tokens": ("gen_ai.request.max_tokens", None),
    "seed": ("gen_ai.request.seed", None),
    "n": ("gen_ai.request.choice.count", 1),
    "presence_penalty": ("gen_ai.request.presence_penalty", 0),
    "frequency_penalty": ("gen_ai.request.frequency_penalty", 0),
    "stop_list": ("gen_ai.request.stop_sequences", []),
}
_REAL = frozenset({"temperature", "top_p", "presence_penalty", "frequency_penalty"})


class RequestSpan:
    """The span of one request while it runs. `asked` and `update` are told what the routes know."""

    def __init__(self, span: Any) -> None:
        self._span = span
        self._begun = time.monotonic()
        self._first: float | None = None
        self._reasons: dict[tuple[int, int], str] = {}
        self._cached: dict[int, int] = {}

    def asked(self, params: SamplingParams, model: str) -> None:
        """How to generate, by the client's wish or by default, and which model or adapter."""
        self._span.set_attribute("gen_ai.request.model", model)
        self._span.set_attribute("gen_ai.response.model", model)
        for name, (attribute, neutral) in _ASKED.items():
            value = getattr(params, name)
            if value is not None and value != neutral:
                self._span.set_attribute(attribute, float(value) if name in _REAL else value)

    def update(self, key: int, output: RequestOutput) -> None:
        """News about prompt number `key`."""
        if self._first is None and output.num_generated_tokens:
            self._first = time.monotonic() - self._begun
        self._cached[key] = output.num_cached_tokens
        for choice in getattr(output, "outputs", ()):  # vectors are no choices
            if choice.finish_reason is not None:
                self._reasons[key, choice.index] = choice.finish_reason

    def end(self, tally: Tally | None, status: str, error: str | None, *, ours: bool) -> None:
        """What has become of it. `ours`: the error is the server's, not the client's."""
        set_attribute = self._span.set_attribute
        if tally is not None and tally.prompt:
            set_attribute("gen_ai.usage.input_tokens", tally.prompt)
            set_attribute("gen_ai.usage.output_tokens", tally.generated)
            set_attribute("gen_ai.usage.cache_read.input_tokens", sum(self._cached.values()))
        if self._first is not None:
            set_attribute("gen_ai.latency.time_to_first_token", self._first)
        if self._reasons:
            set_attribute("gen_ai.response.finish_reasons", [reason for _, reason in sorted(self._reasons.items())])
        name = "http.response.status_code" if status.isdigit() else "rpc.response.status_code"
        set_attribute(name, int(status) if status.isdigit() else status)
        if error is not None:
            set_attribute("error.type", error)
            if ours:
                from opentelemetry.trace import Status, StatusCode

                self._span.set_status(Status(StatusCode.ERROR, error))
        self._span.end()


class Tracer:
    """Makes spans and hands them to a processor, in batches to a collector unless told otherwise."""

    def __init__(self, model: str, processor: Any) -> None:
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        resource = Resource.create({"service.name": "enginecore", "service.version": __version__})
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(processor)
        self._tracer = self._provider.get_tracer("enginecore.server", __version__)
        self._context = TraceContextTextMapPropagator()
        self._model = model

    def start(self, path: str, headers: dict[bytes, bytes], request_id: str, *, rpc: bool) -> RequestSpan:
        """The span of a request, below the one that its `traceparent` names, if any."""
        from opentelemetry.trace import SpanKind

        names = ("traceparent", "tracestate")
        carrier = {name: headers[key].decode("latin-1") for name in names if (key := name.encode()) in headers}
        operation = _OPERATIONS.get(path)
        told: dict[str, Any] = {"enginecore.request.id": request_id}
        told |= {"rpc.system.name": "grpc", "rpc.method": path[1:]} if rpc else {
            "http.request.method": "POST", "http.route": path, "url.path": path,
        }  # fmt: skip
        if operation is not None:
            told |= {
                "gen_ai.operation.name": operation,
                "gen_ai.provider.name": "enginecore",
                "gen_ai.request.model": self._model,
            }
        if operation == "embeddings":
            told["gen_ai.response.model"] = self._model
        name = f"{operation} {self._model}" if operation is not None else path[1:] if rpc else f"POST {path}"
        parent = self._context.extract(carrier)
        return RequestSpan(self._tracer.start_span(name, parent, kind=SpanKind.SERVER, attributes=told))

    def close(self) -> None:
        """Send what is left. Takes seconds where the collector does not answer."""
        self._provider.shutdown()


@contextmanager
def traced(
    tracer: Tracer | None, path: str, headers: dict[bytes, bytes], request_id: str, tally: Tally, state: dict[str, Any]
) -> Iterator[None]:
    """A span for an HTTP request, and nothing without a tracer. `state` is the ASGI scope's: the status of the answer
    is under `status`, and the error of a stream that broke under `broken`, once they are known."""
    if tracer is None:
        yield
        return
    span = tally.span = tracer.start(path, headers, request_id, rpc=False)
    answer: ApiError | None = None
    try:
        yield
        answer = state.get("broken")
    except (ClientGone, asyncio.CancelledError):
        answer = ApiError(499, "", code="client_gone")
        raise
    except Exception as error:
        answer = as_api_error(error) or ApiError(500, "")
        raise
    finally:
        status = state.get("status") or (answer.status if answer is not None else 0)
        if answer is not None:
            span.end(tally, str(status), answer.code or str(answer.status), ours=answer.status >= 500)
        else:
            span.end(tally, str(status), str(status) if status >= 400 else None, ours=status >= 500)


def check_installed() -> None:
    """EngineCoreError that names the extra when the packages are missing."""
    try:
        import opentelemetry.exporter.otlp.proto.http.trace_exporter
        import opentelemetry.sdk.trace  # noqa: F401
    except ImportError as error:
        told = f"--otlp-traces-endpoint needs OpenTelemetry's SDK and OTLP exporter: {error}"
        raise EngineCoreError(told, fix="pip install 'enginecore[otel]'") from error


def make_tracer(endpoint: str | None, model: str) -> Tracer | None:
    """A tracer that sends to an OTLP collector over HTTP, at the very URL given; None without one."""
    if endpoint is None:
        return None
    check_installed()
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    return Tracer(model, BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint, timeout=5)))
