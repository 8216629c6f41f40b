"""The progress bar of offline generation: prompts done, and tokens per second in and out."""

from __future__ import annotations

import time
from types import TracebackType
from typing import Any

from enginecore.frontend.outputs import RequestOutput


class GenerationProgress:
    """A context manager; does nothing when `enabled` is False. Draws on standard error."""

    def __init__(self, total: int, *, enabled: bool) -> None:
        self._bar: Any = None
        self._start = time.monotonic()
        self._prompt_tokens = self._output_tokens = 0
        if enabled:
            self._bar = _make_bar()
            self._task = self._bar.add_task("Generating", total=total, speed="")

    def __enter__(self) -> GenerationProgress:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if self._bar is not None:
            self._bar.stop()

    def done(self, output: RequestOutput) -> None:
        """Count a finished prompt."""
        if self._bar is None:
            return
        self._prompt_tokens += len(output.prompt_token_ids)
        self._output_tokens += output.num_generated_tokens
        seconds = max(time.monotonic() - self._start, 1e-6)
        speed = f"in {self._prompt_tokens / seconds:.0f} tok/s, out {self._output_tokens / seconds:.0f} tok/s"
        self._bar.update(self._task, advance=1, speed=speed)


def _make_bar() -> Any:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[speed]}"),
        console=Console(stderr=True),
    )
