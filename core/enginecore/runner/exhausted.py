"""A step that finds the device's memory exhausted is told apart from every other failure.

The error that torch raises holds the frames of the failed step, and they hold its tensors: they must go before anybody
can hope for free memory.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

from enginecore.device import Backend
from enginecore.errors import OutOfDeviceMemory
from enginecore.parallel.executor import Overlapping, Worker
from enginecore.plan import StepPlan, StepResult
from enginecore.runner.model import StepModel
from enginecore.runner.sleep import Sleeper

Given = TypeVar("Given")


class ModelWorker(Worker, Protocol):
    @property
    def model(self) -> StepModel: ...


class MemoryGuard:
    """A worker around another: exhausted memory comes out as OutOfDeviceMemory, with the figures of that moment, after
    what the step had taken was given back. Other errors pass. It also puts the worker's model to sleep."""

    def __init__(self, worker: ModelWorker, backend: Backend) -> None:
        self._worker, self._backend, self._memory = worker, backend, backend.memory
        self._sleeper: Sleeper | None = None

    def execute(self, plan: StepPlan) -> StepResult:
        return self._guarded(self._worker.execute, plan, plan)

    def submit(self, plan: StepPlan) -> tuple[StepPlan, Any]:
        assert isinstance(self._worker, Overlapping)
        return plan, self._guarded(self._worker.submit, plan, plan)

    def collect(self, handle: tuple[StepPlan, Any]) -> StepResult:
        assert isinstance(self._worker, Overlapping)
        plan, submitted = handle
        return self._guarded(self._worker.collect, submitted, plan)

    def _guarded(self, act: Callable[[Any], Given], given: Any, plan: StepPlan) -> Given:
        try:
            return act(given)
        except Exception as error:
            if not self._memory.out_of_memory(error):
                raise
            free, used = self._memory.memory_info().free_bytes, self._memory.process_used_bytes()
            lines = str(error).strip().splitlines()
            told = lines[0] if lines else type(error).__name__
            traceback.clear_frames(error.__traceback__)
        # Outside the handler: the error is gone, and with it the last that held tensors of the step.
        self._memory.empty_cache()
        raise OutOfDeviceMemory(
            f"a step of {plan.num_tokens} tokens in {len(plan.slots_N)} sequences ran out of the device's memory "
            f"({used} bytes in use by this process, {free} free: {told})",
            fix="lower max_num_batched_tokens, max_num_seqs or memory_utilization",
        )

    def reference_ops(self) -> list[str]:
        return self._worker.reference_ops()

    def sleep(self, level: int) -> None:
        if self._sleeper is None:
            self._sleeper = Sleeper(self._backend, self._worker.model)
        self._sleeper.sleep(level)

    def wake_up(self) -> None:
        assert self._sleeper is not None, "it was not put to sleep"
        self._sleeper.wake()
