"""`enginecore serve`: an OpenAI-compatible server."""

from __future__ import annotations

from typing import Annotated

import typer

from enginecore.cli.common import SCHEDULING, with_engine
from enginecore.config import EngineArgs

HTTP = "HTTP"


@with_engine
def serve(
    engine: EngineArgs,
    host: Annotated[
        str,
        typer.Option(help="Address to listen on; 0.0.0.0 for every network of the machine.", rich_help_panel=HTTP),
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on.", rich_help_panel=HTTP)] = 8000,
    served_model_name: Annotated[
        str | None,
        typer.Option(help="The name that clients ask for. Default: the model as given above.", rich_help_panel=HTTP),
    ] = None,
    api_key: Annotated[
        list[str] | None,
        typer.Option(
            help="Key that clients must send as a bearer token; may be repeated. Default: $ENGINECORE_API_KEY; without "
            "either the server asks for none.",
            rich_help_panel=HTTP,
        ),
    ] = None,
    cors_origin: Annotated[
        list[str] | None,
        typer.Option(
            help="Web origin that browsers may call from, such as https://app.example; may be repeated.",
            rich_help_panel=HTTP,
        ),
    ] = None,
    max_waiting: Annotated[
        int,
        typer.Option(
            metavar="N",
            help="Sequences that may wait for their turn; beyond that a request is refused with 429 and Retry-After.",
            rich_help_panel=SCHEDULING,
        ),
    ] = 1024,
    shutdown_timeout: Annotated[
        float,
        typer.Option(
            metavar="SECONDS", help="On SIGTERM: how long requests in flight may take to finish.", rich_help_panel=HTTP
        ),
    ] = 30.0,
    strict_fields: Annotated[
        bool,
        typer.Option(
            "--strict-fields",
            help="Refuse requests with fields that are not known, instead of ignoring them.",
            rich_help_panel=HTTP,
        ),
    ] = False,
) -> None:
    """Serve a model over HTTP, compatible with OpenAI's clients.

    Routes: /v1/chat/completions, /v1/completions, /v1/models, /tokenize, /detokenize, /health, /version and /metrics.

    Examples: enginecore serve

    enginecore serve ./my-model --device cpu --port 9000 --kv-cache-memory 2GiB --served-model-name my-model
    """
