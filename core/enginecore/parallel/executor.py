"""Executors run a plan on one or more workers. This one runs it in this process."""

from __future__ import annotations

from typing import Protocol

from enginecore.device import Backend
from enginecore.ops.dispatch import Ops
from enginecore.runner import ModelRunner
from enginecore.scheduler.plan import StepPlan, StepResult


class Executor(Protocol):
    def execute(self, plan: StepPlan) -> StepResult: ...

    def reference_ops(self) -> list[str]:
        """Ops that run as torch references because the backend has no kernel for them."""

    def shutdown(self) -> None: ...


class InprocExecutor:
    """One worker, in this process."""

    def __init__(self, runner: ModelRunner, backend: Backend, ops: Ops, kv_caches: list) -> None:
        self._runner = runner
        self._backend = backend
        self._ops = ops
        self._kv_caches = kv_caches

    def execute(self, plan: StepPlan) -> StepResult:
        return self._runner.execute(plan)

    def reference_ops(self) -> list[str]:
        return sorted(self._ops.fallbacks)

    def shutdown(self) -> None:
        self._backend.memory.release_kv(self._kv_caches)
        self._backend.shutdown()
