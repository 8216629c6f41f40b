"""`enginecore chat`: talk to a model in the terminal."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from enginecore.cli.common import with_engine
from enginecore.cli.generate import Temperature, TopP
from enginecore.config import EngineArgs


@with_engine
def chat(
    engine: EngineArgs,
    url: Annotated[
        str | None,
        typer.Option(
            help="Talk to a running OpenAI-compatible server, such as http://127.0.0.1:8000, instead of loading a "
            "model here.",
            rich_help_panel="Server",
        ),
    ] = None,
    api_key: Annotated[
        str | None,
        typer.Option(help="Key of the server at --url.", envvar="ENGINECORE_API_KEY", rich_help_panel="Server"),
    ] = None,
    served_model: Annotated[
        str | None,
        typer.Option(help="Model name to ask for. Default: the first that the server lists.", rich_help_panel="Server"),
    ] = None,
    system: Annotated[str | None, typer.Option(help="System message to begin with.")] = None,
    max_tokens: Annotated[
        int | None,
        typer.Option(
            min=1, metavar="N", help="Most tokens of an answer. Default: what fits.", rich_help_panel="Sampling"
        ),
    ] = None,
    temperature: Temperature = None,
    top_p: TopP = None,
) -> None:
    """Chat with a model in the terminal.

    /reset forgets the conversation, /system TEXT sets the system message, /quit or Ctrl-D leaves; Ctrl-C stops an
    answer. Lines may come through a pipe too: echo "Hello" | enginecore chat

    Example: enginecore chat --url http://127.0.0.1:8000 --system "Answer in one sentence."
    """
    from enginecore.cli.chat_session import ChatSession, run_chat
    from enginecore.cli.local_server import local_server
    from enginecore.cli.sse import base_url

    chosen = {"max_tokens": max_tokens, "temperature": temperature, "top_p": top_p}
    sampling: dict[str, Any] = {name: value for name, value in chosen.items() if value is not None}
    if url is not None:
        run_chat(ChatSession(base_url(url), api_key, served_model, sampling, system))
        return
    with local_server(engine) as server:
        run_chat(ChatSession(server.url, server.api_key, None, sampling, system))
