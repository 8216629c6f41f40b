"""`enginecore serve`: an OpenAI-compatible server."""

from __future__ import annotations

import json
import logging
from typing import Annotated, Any

import msgspec
import typer

from enginecore.cli.common import set_up_logging, tell_loading, with_engine
from enginecore.cli.options import SCHEDULING
from enginecore.config import EngineArgs, parse_bytes
from enginecore.errors import ParameterError

HTTP = "HTTP"


Host = Annotated[
    str,
    typer.Option(
        metavar="ADDRESS",
        help="Address to listen on; 0.0.0.0 for every network of the machine.",
        rich_help_panel=HTTP,
    ),
]
Port = Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on.", rich_help_panel=HTTP)]
ServedModelName = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        help="The name that clients ask for. Default: the model as given above.",
        rich_help_panel=HTTP,
    ),
]
ApiKey = Annotated[
    list[str] | None,
    typer.Option(
        metavar="KEY",
        help="Key that clients must send as a bearer token, as KEY or NAME:KEY; may be repeated. Default: "
        "$ENGINECORE_API_KEY; without any the server asks for none.",
        envvar="ENGINECORE_API_KEY",
        show_envvar=False,
        rich_help_panel=HTTP,
    ),
]
CorsOrigin = Annotated[
    list[str] | None,
    typer.Option(
        metavar="ORIGIN",
        help="Web origin that browsers may call from, such as https://app.example; may be repeated.",
        rich_help_panel=HTTP,
    ),
]
MaxWaiting = Annotated[
    int,
    typer.Option(
        metavar="N",
        help="Sequences that may wait for their turn; beyond that a request is refused with 429 and Retry-After.",
        rich_help_panel=SCHEDULING,
    ),
]
MaxBodySize = Annotated[
    str, typer.Option(metavar="SIZE", help="Largest request body; 413 beyond it.", rich_help_panel=HTTP)
]
ShutdownTimeout = Annotated[
    float,
    typer.Option(
        metavar="SECONDS", help="On SIGTERM: how long requests in flight may take to finish.", rich_help_panel=HTTP
    ),
]
StrictFields = Annotated[
    bool,
    typer.Option(
        "--strict-fields",
        help="Refuse requests with fields that are not known, instead of ignoring them.",
        rich_help_panel=HTTP,
    ),
]
ToolCallParser = Annotated[
    str,
    typer.Option(
        metavar="NAME",
        help="How the model writes calls of functions: auto (by its chat template), none, or a name such as hermes, "
        "llama3_json, mistral or harmony.",
        rich_help_panel=HTTP,
    ),
]
ReasoningParser = Annotated[
    str,
    typer.Option(
        metavar="NAME",
        help="How the model marks its thinking: auto (by its chat template), none, or a name such as think.",
        rich_help_panel=HTTP,
    ),
]
OverrideGenerationConfig = Annotated[
    str | None,
    typer.Option(
        metavar="JSON",
        help="Sampling defaults that go over the model's own, under the names of generation_config.json, such as "
        '{"temperature": 0.7}.',
        rich_help_panel=HTTP,
    ),
]
SslCertfile = Annotated[
    str | None,
    typer.Option(metavar="FILE", help="Certificate, for https; with --ssl-keyfile.", rich_help_panel=HTTP),
]
SslKeyfile = Annotated[
    str | None, typer.Option(metavar="FILE", help="The certificate's private key.", rich_help_panel=HTTP)
]
RootPath = Annotated[
    str,
    typer.Option(metavar="PATH", help="Path that a proxy in front puts before the routes.", rich_help_panel=HTTP),
]
AdminKey = Annotated[
    list[str] | None,
    typer.Option(
        metavar="KEY",
        help="Key for the operators' routes, as KEY or NAME:KEY; may be repeated. Without one, every key opens them.",
        rich_help_panel=HTTP,
    ),
]
ApiKeyFile = Annotated[
    str | None,
    typer.Option(
        metavar="FILE",
        help="File of keys, a line each: NAME:KEY, then perhaps requests-per-minute=N, tokens-per-minute=N, "
        "concurrency=N or admin.",
        rich_help_panel=HTTP,
    ),
]
KeyRequests = Annotated[
    int | None, typer.Option(metavar="N", help="Requests a minute of each key; 429 beyond.", rich_help_panel=HTTP)
]
KeyTokens = Annotated[
    int | None,
    typer.Option(
        metavar="N", help="Tokens a minute of each key, prompts and answers; 429 beyond.", rich_help_panel=HTTP
    ),
]
KeyConcurrency = Annotated[
    int | None, typer.Option(metavar="N", help="Requests of each key at a time; 429 beyond.", rich_help_panel=HTTP)
]
AuditLog = Annotated[
    str | None,
    typer.Option(
        metavar="FILE", help="Append a JSON line for each request, without what it says.", rich_help_panel=HTTP
    ),
]
AuditBodies = Annotated[
    bool, typer.Option("--audit-bodies", help="Put requests' bodies into the audit log, too.", rich_help_panel=HTTP)
]
MaxStoredResponses = Annotated[
    int,
    typer.Option(
        metavar="N",
        help="Responses of /v1/responses that are kept, the least recently used go first; 0 keeps none.",
        rich_help_panel=HTTP,
    ),
]
MaxStoredSize = Annotated[
    str, typer.Option(metavar="SIZE", help="Size of all responses that are kept.", rich_help_panel=HTTP)
]
GrpcPort = Annotated[
    int | None,
    typer.Option(
        min=0,
        max=65535,
        metavar="PORT",
        help="Serve gRPC too, on this port of the same address; 0 takes any. Needs pip install 'enginecore[grpc]'.",
        rich_help_panel=HTTP,
    ),
]
OtlpTracesEndpoint = Annotated[
    str | None,
    typer.Option(
        metavar="URL",
        help="Send an OpenTelemetry span for each request to this collector, over OTLP's HTTP, such as "
        "http://localhost:4318/v1/traces. Needs pip install 'enginecore[otel]'.",
        rich_help_panel=HTTP,
    ),
]
LogRequests = Annotated[bool, typer.Option(help="Log a line for each request.", rich_help_panel=HTTP)]


@with_engine
def serve(
    engine: EngineArgs,
    host: Host = "127.0.0.1",
    port: Port = 8000,
    served_model_name: ServedModelName = None,
    api_key: ApiKey = None,
    admin_key: AdminKey = None,
    api_key_file: ApiKeyFile = None,
    key_requests_per_minute: KeyRequests = None,
    key_tokens_per_minute: KeyTokens = None,
    key_concurrency: KeyConcurrency = None,
    audit_log: AuditLog = None,
    audit_bodies: AuditBodies = False,
    max_stored_responses: MaxStoredResponses = 1024,
    max_stored_size: MaxStoredSize = "64MiB",
    cors_origin: CorsOrigin = None,
    max_waiting: MaxWaiting = 1024,
    max_body_size: MaxBodySize = "16MiB",
    shutdown_timeout: ShutdownTimeout = 30.0,
    strict_fields: StrictFields = False,
    tool_call_parser: ToolCallParser = "auto",
    reasoning_parser: ReasoningParser = "auto",
    override_generation_config: OverrideGenerationConfig = None,
    ssl_certfile: SslCertfile = None,
    ssl_keyfile: SslKeyfile = None,
    root_path: RootPath = "",
    grpc_port: GrpcPort = None,
    otlp_traces_endpoint: OtlpTracesEndpoint = None,
    log_requests: LogRequests = True,
) -> int:
    """Serve a model over HTTP, compatible with OpenAI's and Anthropic's clients.

    Routes: /v1/chat/completions, /v1/completions, /v1/responses, /v1/messages and more; /openapi.json has all.

    Examples: enginecore serve

    enginecore serve ./my-model --device cpu --port 9000 --kv-cache-memory 2GiB --served-model-name my-model
    """
    from enginecore.server.args import ServerArgs
    from enginecore.server.run import serve as run_server

    set_up_logging(min(logging.INFO, logging.getLogger("enginecore").level))
    engine = msgspec.structs.replace(engine, served_model_name=served_model_name, max_waiting=max_waiting)
    server = ServerArgs(
        host=host,
        port=port,
        api_keys=tuple(api_key or ()),
        admin_keys=tuple(admin_key or ()),
        api_key_file=api_key_file,
        key_requests_per_minute=key_requests_per_minute,
        key_tokens_per_minute=key_tokens_per_minute,
        key_concurrency=key_concurrency,
        audit_log=audit_log,
        audit_bodies=audit_bodies,
        max_stored_responses=max_stored_responses,
        max_stored_bytes=parse_bytes(max_stored_size, param="max_stored_size"),
        cors_origins=tuple(cors_origin or ()),
        max_body_bytes=parse_bytes(max_body_size, param="max_body_size"),
        shutdown_timeout=shutdown_timeout,
        strict_fields=strict_fields,
        tool_call_parser=tool_call_parser,
        reasoning_parser=reasoning_parser,
        override_generation_config=json_object(override_generation_config),
        ssl_certfile=ssl_certfile,
        ssl_keyfile=ssl_keyfile,
        root_path=root_path,
        grpc_port=grpc_port,
        otlp_traces_endpoint=otlp_traces_endpoint,
        disable_log_requests=not log_requests,
    )
    tell_loading(engine)
    return run_server(engine, server)


def json_object(text: str | None) -> dict[str, Any]:
    """The value of --override-generation-config."""
    try:
        value = json.loads(text) if text is not None else {}
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise ParameterError(
            f"override_generation_config must be a JSON object, got {text!r}", param="override_generation_config"
        )
    return value
