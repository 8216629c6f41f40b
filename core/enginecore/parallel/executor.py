"""Executors run a plan on one or more workers. This one has its only worker in this process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from enginecore.plan import StepPlan, StepResult


class Worker(Protocol):
    """Runs plans on one device; the model runner is one."""

    def execute(self, plan: StepPlan) -> StepResult: ...

    def reference_ops(self) -> list[str]:
        """Ops that run as torch references because the backend has no kernel for them."""


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

    def shutdown(self) -> None:
        self._release()
