"""Chat templates rendered in processes of their own, with a real time limit: a template that never ends is killed.

A template is code that came with a model. The sandbox keeps it from reaching anything; the process keeps it from
holding the server's thread, memory and lock while it runs.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import selectors
import struct
import subprocess
import sys
import time
from typing import Any

from enginecore.frontend.template import Template, TemplateFailed
from enginecore.frontend.template_worker import frame

MEMORY_LIMIT = 1 << 30


class _Worker:
    """One process and its pipes."""

    def __init__(self, source: str, seconds: float) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "enginecore.frontend.template_worker", str(int(seconds)), str(MEMORY_LIMIT)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            bufsize=0,
        )
        self._send(frame(source))

    def _send(self, data: bytes) -> None:
        assert self._process.stdin is not None
        view = memoryview(data)
        while view:
            view = view[self._process.stdin.write(view) or 0 :]

    def render(self, variables: dict[str, Any], seconds: float) -> list[Any]:
        """[ok, text]. Raises TimeoutError, or OSError and EOFError when the process has ended."""
        self._send(frame(variables))
        deadline = time.monotonic() + seconds
        (length,) = struct.unpack(">I", self._read(4, deadline))
        answer: list[Any] = json.loads(self._read(length, deadline))
        return answer

    def _read(self, count: int, deadline: float) -> bytes:
        assert self._process.stdout is not None
        descriptor = self._process.stdout.fileno()
        chunks = bytearray()
        with selectors.DefaultSelector() as selector:
            selector.register(descriptor, selectors.EVENT_READ)
            while len(chunks) < count:
                if not selector.select(max(0.0, deadline - time.monotonic())):
                    raise TimeoutError
                chunk = os.read(descriptor, count - len(chunks))
                if not chunk:
                    raise EOFError
                chunks += chunk
        return bytes(chunks)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()


class TemplatePool:
    """Renders one template in up to `size` processes. `render` blocks and may be called from several threads."""

    def __init__(self, source: str, *, size: int = 2, seconds: float = 5.0) -> None:
        Template(source)  # a template that does not compile fails here
        self._source = source
        self._seconds = seconds
        self._closed = False
        self._slots: queue.LifoQueue[_Worker | None] = queue.LifoQueue()
        for _ in range(size):
            self._slots.put(None)

    def render(self, variables: dict[str, Any]) -> str:
        """The text. Raises TemplateFailed, also when the template takes too long."""
        try:
            worker = self._slots.get(timeout=4 * self._seconds)
        except queue.Empty:
            raise TemplateFailed("chat templates are being rendered by too many requests", param="messages") from None
        try:
            worker, (ok, text) = self._attempt(worker, variables)
        except TimeoutError:
            worker = None
            raise TemplateFailed(
                f"the chat template took longer than {self._seconds:g} s on these messages", param="messages"
            ) from None
        except (OSError, EOFError) as error:
            worker = None
            raise TemplateFailed("the chat template ended its process", param="messages") from error
        finally:
            if self._closed and worker is not None:
                worker.close()
                worker = None
            self._slots.put(worker)
        if not ok:
            raise TemplateFailed(text, param="messages")
        return str(text)

    def _attempt(self, worker: _Worker | None, variables: dict[str, Any]) -> tuple[_Worker, list[Any]]:
        """Render; an idle process that has died since its last use is replaced once."""
        for fresh in (worker is None, True):
            if worker is None:
                worker = _Worker(self._source, self._seconds)
            try:
                return worker, worker.render(variables, self._seconds)
            except (OSError, EOFError) as error:
                worker.close()
                worker = None
                if fresh or isinstance(error, TimeoutError):
                    raise
        raise AssertionError("not reached")

    def close(self) -> None:
        """End the idle processes; busy ones end with their render."""
        self._closed = True
        while True:
            try:
                worker = self._slots.get_nowait()
            except queue.Empty:
                return
            if worker is not None:
                worker.close()
