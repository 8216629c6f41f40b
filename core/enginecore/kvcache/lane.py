"""A thread for work that a step must not wait for: copies between memories, reading and writing files.

A job runs in the thread and returns what is left to do in the engine's thread, which `TierQueue.drain` does there. So
books are kept by one thread only, and a job touches bytes alone.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from typing import Protocol

logger = logging.getLogger("enginecore.kvcache")

#: A job that runs when its thread is to end gets so long.
LAST_JOB_SECONDS = 5.0

#: Runs in the engine's thread once its job has run.
Finish = Callable[[], None]
Job = Callable[[], Finish]


class Results:
    """What finished jobs have left for the engine's thread."""

    def __init__(self) -> None:
        self._finished: deque[Finish] = deque()
        self._arrived = threading.Condition()

    def put(self, finish: Finish) -> None:
        with self._arrived:
            self._finished.append(finish)
            self._arrived.notify_all()

    def drain(self) -> bool:
        """Run everything that is there; whether there was something. In the engine's thread only."""
        found = bool(self._finished)
        while self._finished:
            self._finished.popleft()()
        return found

    def wait(self, timeout: float) -> bool:
        """Wait until something is there, at most `timeout` seconds; whether there is."""
        with self._arrived:
            return self._arrived.wait_for(lambda: bool(self._finished), timeout)


class Lane(Protocol):
    """Runs jobs one after the other. `failed` takes the place of what a job that raises would have returned."""

    def submit(self, job: Job, failed: Finish, *, first: bool = False) -> None: ...

    @property
    def backlog(self) -> int:
        """Jobs that have not finished."""

    def close(self, timeout: float) -> None: ...


class ThreadLane:
    """`prepare` is called in the thread before anything else (a device may have to be chosen for each thread)."""

    def __init__(self, name: str, results: Results, prepare: Callable[[], None] | None = None) -> None:
        self._results = results
        self._prepare = prepare
        self._urgent: deque[tuple[Job, Finish]] = deque()
        self._jobs: deque[tuple[Job, Finish]] = deque()
        self._changed = threading.Condition()
        self._running = 0
        self._quit = self._abandoned = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    @property
    def backlog(self) -> int:
        return len(self._urgent) + len(self._jobs) + self._running

    def submit(self, job: Job, failed: Finish, *, first: bool = False) -> None:
        """Queue a job, with `first` before all that are not."""
        with self._changed:
            (self._urgent if first else self._jobs).append((job, failed))
            self._changed.notify()

    def close(self, timeout: float) -> None:
        """Finish what is queued, for at most `timeout` seconds, and end the thread; then with the job that runs."""
        with self._changed:
            self._quit = True
            self._changed.notify()
        self._thread.join(timeout)
        self._abandoned = True
        self._thread.join(LAST_JOB_SECONDS)

    def _run(self) -> None:
        if self._prepare is not None:
            self._prepare()
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._urgent or self._jobs or self._quit)
                if self._abandoned or not (self._urgent or self._jobs):
                    return
                job, finish = (self._urgent or self._jobs).popleft()
                self._running = 1
            try:
                finish = job()
            except Exception as error:
                logger.warning("a transfer of KV blocks has failed: %s: %s", type(error).__name__, error)
            self._results.put(finish)
            self._running = 0
