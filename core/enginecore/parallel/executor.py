"""Executors run a plan on one or more workers. This one has its only worker in this process."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol, runtime_checkable

from enginecore.errors import UnsupportedError
from enginecore.plan import StepPlan, StepResult


class Worker(Protocol):
    """Runs plans on one device; the model runner is one."""

    def execute(self, plan: StepPlan) -> StepResult: ...

    def reference_ops(self) -> list[str]:
        """Ops that run as torch references because the backend has no kernel for them."""


@runtime_checkable
class Sleeping(Protocol):
    """What a worker or executor has that can give its device's memory back and take it again."""

    def sleep(self, level: int) -> None: ...

    def wake_up(self) -> None: ...


@runtime_checkable
class Overlapping(Protocol):
    """What a worker or executor has whose steps run while the host does other things. A step is submitted before the
    one before it is collected, and no further."""

    def submit(self, plan: StepPlan) -> Any:
        """Give a step to the device; returns a handle. Raises OutOfDeviceMemory: then nothing of it counts."""

    def collect(self, handle: Any) -> StepResult:
        """Wait for a step's result, in the order of submission. Raises OutOfDeviceMemory."""


class Executor(Worker, Protocol):
    def shutdown(self) -> None: ...


class InprocExecutor:
    """One worker, in this process. `release` gives back what the worker's device holds. `beside`: submitted steps are
    executed by a thread of their own, for workers that return when the work is done."""

    def __init__(self, worker: Worker, release: Callable[[], None], *, beside: bool = False) -> None:
        self._worker = worker
        self._release = release
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="enginecore-steps") if beside else None

    def execute(self, plan: StepPlan) -> StepResult:
        return self._worker.execute(plan)

    def submit(self, plan: StepPlan) -> Any:
        if self._thread is not None:
            return self._thread.submit(self._worker.execute, plan)
        assert isinstance(self._worker, Overlapping)
        return self._worker.submit(plan)

    def collect(self, handle: Any) -> StepResult:
        if self._thread is not None:
            result: StepResult = handle.result()
            return result
        assert isinstance(self._worker, Overlapping)
        return self._worker.collect(handle)

    def reference_ops(self) -> list[str]:
        return self._worker.reference_ops()

    def sleep(self, level: int) -> None:
        """Give the device's memory back: weights wait in host memory (1) or are read from their files again (2).
        Raises UnsupportedError where it cannot."""
        if not isinstance(self._worker, Sleeping):
            raise UnsupportedError("this engine's worker cannot give memory back while idle")
        self._worker.sleep(level)

    def wake_up(self) -> None:
        """Undo `sleep`. Raises OutOfDeviceMemory, and may be tried again."""
        assert isinstance(self._worker, Sleeping)
        self._worker.wake_up()

    def shutdown(self) -> None:
        if self._thread is not None:
            self._thread.shutdown()
        self._release()
