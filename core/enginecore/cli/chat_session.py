"""The conversation behind `enginecore chat`."""

from __future__ import annotations

import asyncio
import sys
import time
from typing import Any

import httpx
from rich.console import Console

from enginecore.cli import sse
from enginecore.errors import EngineCoreError

HELP = "/reset forgets the conversation, /system TEXT sets the system message, /quit or Ctrl-D leaves"


class ChatSession:
    """Messages so far and the server that answers them. An answer that was stopped stays in the conversation as far as
    it came; a question that was refused does not."""

    def __init__(
        self, url: str, api_key: str | None, model: str | None, sampling: dict[str, Any], system: str | None = None
    ) -> None:
        self._url = url
        self._headers = sse.headers_for(api_key)
        self._model = model
        self._sampling = sampling
        self._system = system
        self._turns: list[dict[str, str]] = []

    @property
    def messages(self) -> list[dict[str, str]]:
        first = [{"role": "system", "content": self._system}] if self._system else []
        return [*first, *self._turns]

    def reset(self) -> None:
        self._turns.clear()

    def set_system(self, text: str) -> None:
        """Takes effect from the next question on; empty removes the system message."""
        self._system = text or None

    def ask(self, question: str, console: Console) -> None:
        """Print the answer as it comes. Ctrl-C stops it. Raises ServerReplyError when the server refuses or breaks
        off."""
        self._turns.append({"role": "user", "content": question})
        parts: list[str] = []
        begun = time.monotonic()
        try:
            usage = asyncio.run(self._answer(parts, console))
        except KeyboardInterrupt:
            usage = {}
        except EngineCoreError:
            self._turns.pop()
            raise
        self._turns.append({"role": "assistant", "content": "".join(parts)})
        _write(console, "\n")
        if console.is_terminal:
            tokens, seconds = usage.get("completion_tokens"), time.monotonic() - begun
            _note(f"{tokens} tokens, {tokens / max(seconds, 1e-6):.1f} a second" if tokens else "stopped")

    async def _answer(self, parts: list[str], console: Console) -> dict[str, Any]:
        """Stream one answer into `parts` and onto the console; returns its usage."""
        usage: dict[str, Any] = {}
        async with httpx.AsyncClient(timeout=None, headers=self._headers) as client:
            if self._model is None:
                self._model = await sse.first_model(client, self._url)
            body = {
                "model": self._model,
                "messages": self.messages,
                "stream": True,
                "stream_options": {"include_usage": True},
                **self._sampling,
            }
            async for event in sse.stream(client, f"{self._url}/v1/chat/completions", body):
                usage = event.get("usage") or usage
                for choice in event.get("choices") or []:
                    text = (choice.get("delta") or {}).get("content")
                    if text:
                        parts.append(text)
                        _write(console, text)
        return usage


def run_chat(session: ChatSession) -> None:
    """Read questions until the input ends. On a terminal a refused question is shown and the chat goes on; a script
    gets the error."""
    console = Console(highlight=False)
    interactive = sys.stdin.isatty()
    if interactive:
        _enable_line_editing()
        _note(HELP)
    while True:
        line = _read_line(interactive)
        if line is None:
            return
        if not line.strip():
            continue
        command, _, rest = line.strip().partition(" ")
        if command in ("/quit", "/exit"):
            return
        if command == "/reset":
            session.reset()
            _note("the conversation is forgotten")
        elif command == "/system":
            session.set_system(rest.strip())
            _note("system message set" if rest.strip() else "system message removed")
        elif command.startswith("/"):
            _note(HELP)
        else:
            try:
                session.ask(line, console)
            except EngineCoreError as error:
                if not interactive:
                    raise
                console.print(f"error: {error}", style="red", markup=False)


def _read_line(interactive: bool) -> str | None:
    """The next line without its end, None when there is none. Ctrl-C at the prompt only clears the line."""
    if not interactive:
        line = sys.stdin.readline()
        return line.rstrip("\n") if line else None
    try:
        return input("\n> ")
    except EOFError:
        return None
    except KeyboardInterrupt:
        print()
        _note("Ctrl-D or /quit leaves")
        return ""


def _enable_line_editing() -> None:
    try:
        import readline  # noqa: F401
    except ImportError:
        return


def _write(console: Console, text: str) -> None:
    console.print(text, end="", markup=False, soft_wrap=True)
    console.file.flush()


def _note(text: str) -> None:
    """For people, on standard error: a pipe gets answers only."""
    Console(stderr=True, highlight=False).print(text, style="dim", markup=False, soft_wrap=True)
