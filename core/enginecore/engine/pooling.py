"""The engine of a pooling model: add texts, step, collect numbers. Synchronous and single-threaded, as `Engine` is.

It has the methods of `Engine` that a frontend calls. Each of its steps begins and ends texts, and no state is kept in
between, so there is no cache to reset, to pin in or to lose.
"""

from __future__ import annotations

import logging
import traceback
from collections.abc import Callable, Iterable
from typing import Any

from enginecore.config import EngineConfig
from enginecore.engine.account import MemoryAccount
from enginecore.errors import UnsupportedError
from enginecore.pooling import Pooled
from enginecore.request import EngineOutput, EngineRequest, EngineStats, StepOutputs
from enginecore.runner.pooling import PoolingRunner
from enginecore.scheduler.journal import Journal
from enginecore.scheduler.pooling import PoolingScheduler

logger = logging.getLogger("enginecore.engine")


class PoolingEngine:
    """Owns the scheduler and the runner. `out_of_memory` tells whether an error is the device's exhausted memory,
    `make_room` gives back what a failed step had taken, `release` everything at the end."""

    def __init__(
        self, config: EngineConfig, runner: PoolingRunner, *, account: MemoryAccount,
        reference_ops: Callable[[], list[str]], out_of_memory: Callable[[Exception], bool],
        make_room: Callable[[], None], release: Callable[[], None],
    ) -> None:  # fmt: skip
        self.config = config
        self._runner, self._account, self._reference_ops = runner, account, reference_ops
        self._out_of_memory, self._make_room, self._release = out_of_memory, make_room, release
        self.scheduler = PoolingScheduler(
            max_rows=config.max_num_seqs,
            max_tokens=config.max_num_batched_tokens,
            max_model_len=config.max_model_len,
            policy=config.scheduling_policy,
            tenant_weights=config.tenant_weights,
            journal=Journal(),
        )
        self._refused: list[EngineOutput] = []
        self._lost_steps = 0

    def add(self, request: EngineRequest) -> None:
        problem = self.scheduler.add(request)
        if problem is not None:
            self._refused.append(_error(request.request_id, problem))

    def abort(self, request_ids: Iterable[str], reason: str = "abort") -> list[str]:
        """Drop requests that wait; returns those that did."""
        return self.scheduler.abort(request_ids, reason)

    def has_work(self) -> bool:
        return self.scheduler.has_work() or bool(self._refused)

    def step(self) -> StepOutputs:
        """Run one step; with nothing to run, only reports what is pending."""
        outputs, self._refused = self._refused, []
        batch = self.scheduler.schedule()
        if batch:
            results = self._execute(batch)
            finished = [_output(request, result) for request, result in zip(batch, results, strict=True)]
            self.scheduler.finish(batch, [str(output.finish_reason) for output in finished])
            outputs += finished
        return StepOutputs(outputs, self.stats())

    def _execute(self, batch: list[EngineRequest]) -> list[Pooled | str]:
        """The runner's answers. A step that finds memory exhausted costs its own requests and no others."""
        try:
            results: list[Pooled | str] = self._runner.execute(batch)
            return results
        except Exception as error:
            if not self._out_of_memory(error):
                raise
            told = f"a step of {len(batch)} texts ran out of the device's memory: {str(error).strip()[:200]}"
            traceback.clear_frames(error.__traceback__)
        self._make_room()
        self._lost_steps += 1
        logger.error("%s", told)
        return [f"{told} (lower max_num_batched_tokens or memory_utilization)"] * len(batch)

    def stats(self) -> EngineStats:
        stats = self.scheduler.stats()
        stats.reference_ops, stats.lost_steps = self._reference_ops(), self._lost_steps
        stats.eager_steps = stats.num_steps
        return stats

    def memory(self) -> dict[str, int]:
        """As `Engine.memory`: no KV blocks, and bytes as measured."""
        names = ("in_use", "cached", "free", "slots_held", "tokens_held", "forks", "forked_tokens")
        return {**dict.fromkeys(names, 0), **self._account.figures()}

    def explain(self, request_ids: list[str]) -> list[dict[str, Any]]:
        """What became of requests, those that are still known."""
        found = (self.scheduler.journal.explain(request_id) for request_id in request_ids)
        return [answer for answer in found if answer is not None]

    def use_tokenizer(self, serialized: str, eos_token_ids: list[int]) -> None:
        """Nothing follows a grammar here."""

    def when_idle(self) -> None:
        """Nothing is worth preparing."""

    def tidy(self) -> bool:
        """Nothing is moved between memories."""
        return False

    def reset_prefix_cache(self) -> int:
        return 0

    def pin(self, token_ids: list[int], seconds: float, cache_salt: str | None = None) -> None:
        raise UnsupportedError("a pooling model keeps no prefixes, so there is nothing to pin")

    def unpin(self, name: str) -> bool:
        return False

    def list_pins(self) -> list[dict[str, Any]]:
        return []

    def sleep(self, level: int = 1) -> None:
        raise UnsupportedError("the engine of a pooling model cannot give memory back while idle")

    def wake_up(self) -> None:
        """It never sleeps."""

    def is_sleeping(self) -> bool:
        return False

    def shutdown(self) -> None:
        self._release()


def _error(request_id: str, problem: str) -> EngineOutput:
    return EngineOutput(request_id, [], finish_reason="error", error=problem)


def _output(request: EngineRequest, result: Pooled | str) -> EngineOutput:
    if isinstance(result, str):
        return _error(request.request_id, result)
    return EngineOutput(request.request_id, [], finish_reason="stop", pooled=result)
