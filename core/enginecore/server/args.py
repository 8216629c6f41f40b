"""What an operator may set about the HTTP server."""

from __future__ import annotations

from typing import Any

import msgspec

from enginecore.errors import ParameterError


class ServerArgs(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of the HTTP server.

    `api_keys` ("KEY" or "NAME:KEY"), `admin_keys` and the lines of `api_key_file`: when there are any, every route but
    /health, /ping, /version and /metrics needs one of them. `key_requests_per_minute`, `key_tokens_per_minute` and
    `key_concurrency` hold for each name of a key, or for all together where there are no keys. `audit_log` is a file;
    `audit_bodies` puts what requests say into it, too. `max_waiting`: how many sequences may wait beyond those that can
    run (None: the engine's setting). `max_stored_responses` and `max_stored_bytes`: how much of /v1/responses is kept,
    the least recently used go first. `shutdown_timeout`: seconds that requests in flight get after SIGTERM.
    `strict_fields` refuses unknown request fields instead of logging them. `chat_template` (a file or the template
    itself) replaces the model's. `override_generation_config` sets sampling defaults under generation_config.json's
    names. `tool_call_parser` and `reasoning_parser` name how the model writes calls and thinks; "auto" goes by its chat
    template, "none" takes everything for text. `grpc_port` serves gRPC as well (0: any free port).
    `otlp_traces_endpoint`: a URL of a collector that gets a span for each request.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    api_keys: tuple[str, ...] = ()
    admin_keys: tuple[str, ...] = ()
    api_key_file: str | None = None
    key_requests_per_minute: int | None = None
    key_tokens_per_minute: int | None = None
    key_concurrency: int | None = None
    audit_log: str | None = None
    audit_bodies: bool = False
    cors_origins: tuple[str, ...] = ()
    max_body_bytes: int = 16 * 2**20
    max_header_bytes: int = 64 * 2**10
    max_headers: int = 128
    max_waiting: int | None = None
    max_stored_responses: int = 1024
    max_stored_bytes: int = 64 * 2**20
    shutdown_timeout: float = 30.0
    strict_fields: bool = False
    chat_template: str | None = None
    override_generation_config: dict[str, Any] = {}
    grpc_port: int | None = None
    otlp_traces_endpoint: str | None = None
    tool_call_parser: str = "auto"
    reasoning_parser: str = "auto"
    ssl_certfile: str | None = None
    ssl_keyfile: str | None = None
    disable_log_requests: bool = False
    root_path: str = ""

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise ParameterError(f"port must be between 0 and 65535, got {self.port}", param="port")
        if self.grpc_port is not None and not 0 <= self.grpc_port <= 65535:
            raise ParameterError(f"grpc_port must be between 0 and 65535, got {self.grpc_port}", param="grpc_port")
        endpoint = self.otlp_traces_endpoint
        if endpoint is not None and not endpoint.startswith(("http://", "https://")):
            told = f"otlp_traces_endpoint must be a URL such as http://localhost:4318/v1/traces, got {endpoint!r}"
            raise ParameterError(told, param="otlp_traces_endpoint")
        for name in ("max_body_bytes", "max_header_bytes", "max_headers"):
            if getattr(self, name) < 1:
                raise ParameterError(f"{name} must be at least 1, got {getattr(self, name)}", param=name)
        if not 0 <= self.shutdown_timeout < float("inf"):
            raise ParameterError(
                f"shutdown_timeout must be at least 0, got {self.shutdown_timeout}", param="shutdown_timeout"
            )
        for name in ("max_stored_responses", "max_stored_bytes"):
            if getattr(self, name) < 0:
                raise ParameterError(f"{name} must be at least 0, got {getattr(self, name)}", param=name)
        if self.max_waiting is not None and self.max_waiting < 0:
            raise ParameterError(f"max_waiting must be at least 0, got {self.max_waiting}", param="max_waiting")
        if self.tool_call_parser is not None or self.reasoning_parser is not None:
            from enginecore.frontend.tools.plan import check_parsers  # imports much, and is seldom needed

            check_parsers(self.tool_call_parser, self.reasoning_parser)
        for name in ("key_requests_per_minute", "key_tokens_per_minute", "key_concurrency"):
            if getattr(self, name) is not None and getattr(self, name) < 1:
                raise ParameterError(f"{name} must be at least 1, got {getattr(self, name)}", param=name)
        if any(not key for key in (*self.api_keys, *self.admin_keys)):
            raise ParameterError("an API key must not be empty", param="api_keys")
        if bool(self.ssl_certfile) != bool(self.ssl_keyfile):
            raise ParameterError("give ssl_certfile and ssl_keyfile together", param="ssl_certfile")
