"""The files of `enginecore run-batch`, and one run from the first line to the last."""

from __future__ import annotations

import asyncio
import contextlib
import os
import queue
import signal
import sys
import tempfile
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

from enginecore.config import EngineArgs
from enginecore.errors import EngineCoreError, ParameterError
from enginecore.server.args import ServerArgs
from enginecore.server.batch import MAX_LINE_BYTES, BatchCounts, BatchRun, is_answer

#: Lines that are read ahead of the workers.
_AHEAD = 64
_MAX_IN_FLIGHT = 4096


class Files:
    """Where requests come from and answers go, opened and checked before the model is loaded. None is standard output.

    An output that exists is only touched with `resume`, which keeps its answers, or `overwrite`.
    """

    def __init__(self, source: str, target: Path | None, *, resume: bool, overwrite: bool) -> None:
        self._source = None if source == "-" else Path(source)
        if self._source is not None and target is not None and target.exists() and target.samefile(self._source):
            raise ParameterError(f"{target} is the input too", param="target")
        if resume and target is None:
            raise ParameterError("--resume needs a file of answers, not standard output", param="resume")
        self._in: BinaryIO = _standard_input() if self._source is None else self._source.open("rb")
        self.done: frozenset[str] = frozenset()
        self._target = target
        self._out: BinaryIO | None = None
        try:
            self._open(resume, overwrite)
        except BaseException:
            self.close()
            raise

    def _open(self, resume: bool, overwrite: bool) -> None:
        target = self._target
        if target is None:
            self._out = sys.stdout.buffer
            return
        if target.exists() and not target.is_file():
            if target.is_dir():
                raise ParameterError(f"{target} is a directory", param="target")
        elif target.exists() and target.stat().st_size and not overwrite:
            if not resume:
                raise ParameterError(
                    f"{target} exists", param="target", fix="--resume goes on with it, --overwrite begins it anew"
                )
            self.done = _keep_answers(target)
        self._out = target.open("wb" if overwrite else "ab")

    def write(self, line: bytes) -> None:
        """At once, so that an end at any moment leaves whole lines and perhaps one piece."""
        assert self._out is not None
        self._out.write(line)
        self._out.flush()

    def total(self) -> int | None:
        """Lines of the input that are not empty; None where that cannot be known without reading it up."""
        if self._source is None or not self._source.is_file():
            return None
        with self._source.open("rb") as lines:
            return sum(1 for _ in _numbered(lines))

    async def lines(self) -> AsyncIterator[tuple[int, bytes]]:
        """(number, text) of each line. A thread reads them, for a pipe may make one wait for ever; it is a daemon for
        the same reason."""
        loop = asyncio.get_running_loop()
        found: queue.Queue[tuple[int, bytes] | BaseException | None] = queue.Queue(_AHEAD)
        there = asyncio.Semaphore(0)
        ended = threading.Event()

        def put(item: tuple[int, bytes] | BaseException | None) -> None:
            while not ended.is_set():
                with contextlib.suppress(queue.Full):
                    found.put(item, timeout=0.2)
                    with contextlib.suppress(RuntimeError):  # the loop has ended
                        loop.call_soon_threadsafe(there.release)
                    return

        def read() -> None:
            try:
                for line in _numbered(self._in):
                    put(line)
                    if ended.is_set():
                        return
                put(None)
            except (OSError, ValueError) as error:
                put(error)

        threading.Thread(target=read, daemon=True, name="enginecore-batch-reader").start()
        try:
            while True:
                await there.acquire()
                item = found.get_nowait()
                if isinstance(item, BaseException):
                    raise EngineCoreError(f"the input cannot be read: {item}") from item
                if item is None:
                    return
                yield item
        finally:
            ended.set()

    def close(self) -> None:
        """Standard streams stay open."""
        if self._source is not None:
            self._in.close()
        if self._target is not None and self._out is not None:
            self._out.close()

    def __enter__(self) -> Files:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _standard_input() -> BinaryIO:
    """A reader of its own: the interpreter closes the usual one at its end, and cannot while a thread waits there."""
    try:
        return os.fdopen(os.dup(sys.stdin.fileno()), "rb")
    except OSError:
        return sys.stdin.buffer


def _numbered(lines: BinaryIO) -> Iterator[tuple[int, bytes]]:
    """Lines with their numbers, without empty ones. Of one that is too long the beginning stands for it."""
    number = 0
    while line := lines.readline(MAX_LINE_BYTES):
        number += 1
        rest = line
        while len(rest) == MAX_LINE_BYTES and not rest.endswith(b"\n"):
            rest = lines.readline(MAX_LINE_BYTES)
        if line.strip():
            yield number, line


def _answered(target: Path, number: int, line: bytes) -> str | None:
    try:
        return is_answer(line)
    except ValueError as error:
        told = f"{target}, line {number}: this is no file of answers: {error}"
        raise ParameterError(told, param="target") from error


def _keep_answers(target: Path) -> frozenset[str]:
    """Leave in the file only answers that stand, whole or not at all; returns their custom_ids."""
    done: set[str] = set()
    handle, temporary = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
    try:
        with os.fdopen(handle, "wb") as kept, target.open("rb") as lines:
            os.fchmod(kept.fileno(), target.stat().st_mode & 0o777)
            for number, line in enumerate(lines, 1):
                if not line.endswith(b"\n"):
                    break  # cut off
                custom_id = _answered(target, number, line)
                if custom_id is not None and custom_id not in done:
                    done.add(custom_id)
                    kept.write(line)
        os.replace(temporary, target)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)
        raise
    return frozenset(done)


def run_files(
    engine: EngineArgs, server: ServerArgs, files: Files, *, in_flight: int | None, progress: bool
) -> dict[str, Any]:
    """Answer every line; returns the summary, in which `finished` is false after a signal. Raises EngineCoreError when
    the engine cannot start or dies: what is written by then stays."""
    return asyncio.run(_run(engine, server, files, in_flight, progress))


async def _run(
    engine: EngineArgs, server: ServerArgs, files: Files, in_flight: int | None, progress: bool
) -> dict[str, Any]:
    from enginecore.frontend.async_llm import AsyncLLM
    from enginecore.metrics import Metrics
    from enginecore.server.app import create_app

    running = asyncio.current_task()
    assert running is not None
    stopped = asyncio.Event()

    def stop() -> None:
        stopped.set()
        running.cancel()

    for number in (signal.SIGINT, signal.SIGTERM):
        with contextlib.suppress(RuntimeError, NotImplementedError, ValueError):  # not the main thread
            asyncio.get_running_loop().add_signal_handler(number, stop)
    counts, begun = BatchCounts(), time.monotonic()
    with contextlib.suppress(asyncio.CancelledError):
        llm = await AsyncLLM.create(
            engine,
            observer=lambda config: Metrics(config.served_model_name, config.num_blocks),
            sampling_overrides=server.override_generation_config,
        )
        async with llm:
            begun = time.monotonic()
            app = create_app(llm, server)
            workers = in_flight or min(_MAX_IN_FLIGHT, 2 * llm.config.max_num_seqs)
            with _bar(files.total() if progress else None, shown=progress) as told:
                batch = BatchRun(app, files.lines(), files.write, done=files.done, in_flight=workers, progress=told)
                counts = batch.counts
                await batch.run()
    return {
        "object": "batch.summary",
        "finished": not stopped.is_set(),
        "requests": counts.lines,
        "succeeded": counts.succeeded,
        "failed": counts.failed,
        "invalid": counts.invalid,
        "skipped": counts.skipped,
        "failures": dict(counts.failures),
        "prompt_tokens": counts.prompt_tokens,
        "generated_tokens": counts.generated_tokens,
        "seconds": round(time.monotonic() - begun, 3),
    }


@contextlib.contextmanager
def _bar(total: int | None, *, shown: bool) -> Iterator[Callable[[BatchCounts], None]]:
    """A bar on a terminal's standard error, with what failed and tokens a second; nothing elsewhere."""
    if not shown or not sys.stderr.isatty():
        yield lambda counts: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[told]}"), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bars:
        task, begun = bars.add_task("requests", total=total, told=""), time.monotonic()

        def update(counts: BatchCounts) -> None:
            rate = counts.generated_tokens / max(time.monotonic() - begun, 1e-9)
            wrong = counts.failed + counts.invalid
            told = f"{rate:.0f} tokens/s" + (f", {wrong} failed" if wrong else "")
            bars.update(task, completed=counts.lines, told=told)

        yield update
