"""The engine: add requests, step, collect outputs. Synchronous and single-threaded."""

from __future__ import annotations

from collections.abc import Iterable

from enginecore.clock import Clock, RealClock
from enginecore.config import EngineConfig
from enginecore.parallel.executor import Executor
from enginecore.request import EngineOutput, EngineRequest, EngineStats, StepOutputs
from enginecore.scheduler import Scheduler, SchedulerConfig


class Engine:
    """Owns the scheduler and the executor. Requests that can never run come back as error outputs of the next step.

    `clock` passes the time that a simulated device says its steps take.
    """

    def __init__(self, config: EngineConfig, executor: Executor, clock: Clock | None = None) -> None:
        self.config = config
        self.executor = executor
        self.clock = clock or RealClock()
        self.scheduler = Scheduler(scheduler_config(config))
        self._refused: list[EngineOutput] = []

    def add(self, request: EngineRequest) -> None:
        problem = self.scheduler.add(request)
        if problem is not None:
            self._refused.append(EngineOutput(request.request_id, [], finish_reason="error", error=problem))

    def abort(self, request_ids: Iterable[str]) -> list[str]:
        """Drop requests; those that were known, each also reported by the caller as it sees fit."""
        return self.scheduler.abort(request_ids)

    def has_work(self) -> bool:
        return self.scheduler.has_work() or bool(self._refused)

    def step(self) -> StepOutputs:
        """Run one step; with nothing to run, only reports what is pending."""
        outputs, self._refused = self._refused, []
        if self.scheduler.has_work():
            plan = self.scheduler.schedule()
            result = self.executor.execute(plan)
            outputs += self.scheduler.update(plan, result)
            if result.seconds is not None:
                self.clock.spend(result.seconds)
        return StepOutputs(outputs, self.stats())

    def stats(self) -> EngineStats:
        stats = self.scheduler.stats()
        stats.reference_ops = self.executor.reference_ops()
        return stats

    def reset_prefix_cache(self) -> int:
        return self.scheduler.reset_prefix_cache()

    def shutdown(self) -> None:
        self.executor.shutdown()


def scheduler_config(config: EngineConfig) -> SchedulerConfig:
    return SchedulerConfig(
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_model_len=config.max_model_len,
        num_blocks=config.num_blocks,
        block_size=config.block_size,
        prefix_caching=config.enable_prefix_caching,
        policy=config.scheduling_policy,
        long_prefill_token_threshold=config.long_prefill_token_threshold,
        seed=config.seed,
    )
