"""Executors run a plan on one or more workers. This one has its only worker in this process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, runtime_checkable

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


class Executor(Worker, Protocol):
    def shutdown(self) -> None: ...


class InprocExecutor:
    """One worker, in this process. `release` gives back what the worker's device holds."""

    def __init__(self, worker: Worker, release: Callable[[], None]) -> None:
        self._worker = worker
        self._release = release

    def execute(self, plan: StepPlan) -> StepResult:
        return self._worker.execute(plan)

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
        self._release()
