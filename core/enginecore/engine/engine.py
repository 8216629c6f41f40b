"""The engine: add requests, step, collect outputs. Single-threaded; with overlap a step is underway between calls."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from enginecore.clock import Clock, RealClock
from enginecore.config import EngineConfig
from enginecore.engine.account import MemoryAccount
from enginecore.engine.adapters import AdapterCalls
from enginecore.engine.exhausted import lose_step
from enginecore.engine.grammar_gate import GrammarGate
from enginecore.engine.kv_events import EventPublisher
from enginecore.errors import OutOfDeviceMemory, UnsupportedError
from enginecore.kvcache.tiers import Tiers
from enginecore.parallel.executor import Executor, Overlapping, Sleeping
from enginecore.plan import StepResult
from enginecore.request import EngineOutput, EngineRequest, EngineStats, StepOutputs
from enginecore.runner.grammar import GrammarStore
from enginecore.scheduler import Scheduler, SchedulerConfig
from enginecore.scheduler.journal import Journal
from enginecore.scheduler.lookahead import Flight
from enginecore.scheduler.pinning import prefix_name

#: Longest wait for blocks from a lower tier when nothing else runs: new requests are not looked at meanwhile.
MAX_WAIT_S = 0.01


@dataclass(frozen=True)
class Underway:
    """A step that the executor has, by its handle; or one that it had no memory for."""

    flight: Flight
    handle: Any
    error: OutOfDeviceMemory | None = None


class Engine(AdapterCalls):
    """Owns the scheduler and the executor. Requests that can never run come back as error outputs of the next step.

    `clock` passes the time that a simulated device says its steps take. `overlap`: a step is underway when `step`
    returns, and its outputs come from the next call, which plans and submits the step after it first where that can be
    planned so early.
    """

    def __init__(
        self, config: EngineConfig, executor: Executor, clock: Clock | None = None,
        publisher: EventPublisher | None = None, grammars: GrammarStore | None = None, *, overlap: bool = False,
    ) -> None:  # fmt: skip
        self.config = config
        self.executor = executor
        self.clock = clock or RealClock()
        self.scheduler = Scheduler(scheduler_config(config), Journal(clock=self.clock.now),
                                   record_events=publisher is not None)  # fmt: skip
        self._publisher = publisher
        self._refused: list[EngineOutput] = []
        self._grammars = GrammarGate(grammars)
        #: When requests came whose grammar is being compiled.
        self._held_since: dict[str, float] = {}
        self._overlap = overlap
        self._underway: Underway | None = None
        self._graph_replays = self._eager_steps = self._lost_steps = self._steps_ahead = 0
        self._asleep = False
        #: Who owns which bytes of the device, for the log of a step that ran out of memory.
        self.ledger: dict[str, int] = {}
        self.account: MemoryAccount | None = None

    def use_tiers(self, tiers: Tiers | None) -> None:
        """Keep blocks below the device, too. Before the first request."""
        self.scheduler.tiers = tiers
        if tiers is not None and self.scheduler.events is not None:
            tiers.host.on_change = self.scheduler.events.host_changed

    def add(self, request: EngineRequest) -> None:
        if request.grammar is None:
            self._schedule(request)
        else:
            self._held_since[request.request_id] = self.clock.now()
            self._grammars.hold(request)

    def _schedule(self, request: EngineRequest, problem: str | None = None) -> None:
        if self._asleep:
            problem = "the engine is asleep: wake it up (POST /wake_up), then try again"
        problem = problem or self._adapter_problem(request) or self.scheduler.add(request)
        since = self._held_since.pop(request.request_id, None)
        if since is not None:
            self.scheduler.journal.held(request.request_id, since)
        if problem is not None:
            self._refused.append(EngineOutput(request.request_id, [], finish_reason="error", error=problem))

    def abort(self, request_ids: Iterable[str], reason: str = "abort") -> list[str]:
        """Drop requests; those that were known, each also reported by the caller as it sees fit. `reason` is for
        `explain`: "stop" when a stop string has ended them."""
        request_ids = list(request_ids)
        for request_id in request_ids:
            self._held_since.pop(request_id, None)
        return self._grammars.abort(request_ids) + self.scheduler.abort(request_ids, reason)

    def has_work(self) -> bool:
        waits = bool(self._refused) or bool(self._grammars) or self._underway is not None
        return waits or self.scheduler.has_work()

    def step(self) -> StepOutputs:
        """Run one step, or get the next one underway; with nothing to run, only reports what is pending."""
        if self._grammars:
            for request, problem in self._grammars.ready(wait=not self.scheduler.has_work()):
                self._schedule(request, problem)
        outputs, self._refused = self._refused, []
        before, self._underway = self._underway, None
        if before is not None:
            if self.scheduler.can_plan_ahead():
                self._underway = self._launch(ahead=True)
            outputs += self._land(before)
        if self._underway is None and self.scheduler.has_work():
            self._underway = self._launch(may_wait=not outputs)
        if self._underway is not None and (not self._overlap or self._underway.error is not None):
            outputs += self._land(self._underway)
            self._underway = None
        return StepOutputs(outputs, self.stats())

    def _launch(self, *, ahead: bool = False, may_wait: bool = False) -> Underway | None:
        """Plan a step and get it underway; None when there is none to run now. `ahead`: others are underway."""
        plan = self.scheduler.schedule()
        if plan.empty and (ahead or not may_wait or self.scheduler.wait_for_blocks(MAX_WAIT_S)):
            self._publish_events()
            return None
        handle, error = None, None
        if self._overlap:
            assert isinstance(self.executor, Overlapping)
            try:
                handle = self.executor.submit(plan)
            except OutOfDeviceMemory as exhausted:
                error = exhausted
            self._steps_ahead += ahead
        return Underway(self.scheduler.depart(plan), handle, error)

    def _land(self, step: Underway) -> list[EngineOutput]:
        """Wait for a step and book it."""
        try:
            result = self._result(step)
        except OutOfDeviceMemory as error:
            self._lost_steps += 1
            return lose_step(self.scheduler, step.flight, error, self.ledger)
        self._graph_replays += result.replayed
        self._eager_steps += not result.replayed
        if result.seconds is not None:
            self.clock.spend(result.seconds)
        outputs = self.scheduler.book(step.flight, result)
        self._publish_events()
        if self.adapters is not None:
            self.adapters.drop_unused()
        return outputs

    def _result(self, step: Underway) -> StepResult:
        if step.error is not None:
            raise step.error
        if not self._overlap:
            return self.executor.execute(step.flight.plan)
        assert isinstance(self.executor, Overlapping)
        return self.executor.collect(step.handle)

    def _publish_events(self) -> None:
        if self._publisher is not None and self.scheduler.events is not None:
            events = self.scheduler.events.take()
            if events:
                self._publisher.publish(events)

    def stats(self) -> EngineStats:
        stats = self.scheduler.stats()
        stats.reference_ops = self.executor.reference_ops()
        stats.graph_replays, stats.eager_steps = self._graph_replays, self._eager_steps
        stats.lost_steps, stats.steps_ahead = self._lost_steps, self._steps_ahead
        if self.adapters is not None:
            stats.adapter_steps, stats.adapter_swaps = self.adapters.figures()
        return stats

    def sleep(self, level: int = 1) -> None:
        """Give the device's memory back until `wake_up`: weights wait in host memory (level 1) or are read from their
        files again (level 2), what the device has cached is forgotten (lower tiers keep what they have)."""
        if level not in (1, 2):
            raise UnsupportedError(f"sleep level {level} is not supported", fix="level 1 keeps weights in host memory, "
                                   "level 2 reads them again")  # fmt: skip
        if self._underway is not None and not self.scheduler.has_work():
            self._refused += self._land(self._underway)
            self._underway = None
        if self.has_work():
            raise UnsupportedError("requests are running or waiting", fix="sleep when the engine is idle")
        if not isinstance(self.executor, Sleeping):
            raise UnsupportedError("this engine's executor cannot give memory back while idle")
        if not self._asleep:
            self.scheduler.lose_device_cache()
            self.executor.sleep(level)
            self._asleep = True
            self._publish_events()

    def wake_up(self) -> None:
        """Undo `sleep`. Raises OutOfDeviceMemory, and may be tried again."""
        if self._asleep and isinstance(self.executor, Sleeping):
            self.executor.wake_up()
            self._asleep = False

    def is_sleeping(self) -> bool:
        return self._asleep

    def reset_prefix_cache(self) -> int:
        count = self.scheduler.reset_prefix_cache()
        self._publish_events()
        return count

    def use_tokenizer(self, serialized: str, eos_token_ids: list[int]) -> None:
        """What grammars are followed with; see `GrammarStore.use_tokenizer`."""
        self._grammars.use_tokenizer(serialized, eos_token_ids)

    def when_idle(self) -> None:
        """Nothing to do for a while: prepare what a request would have to wait for."""
        self._grammars.warm_up()

    def tidy(self) -> bool:
        """Nothing to do: take in what has been moved between memories. Whether something still is."""
        return self.scheduler.tidy()

    def pin(self, token_ids: list[int], seconds: float, cache_salt: str | None = None) -> dict[str, Any] | None:
        """Keep the full blocks of a prefix cached for so long; what came of it, None when too many are pinned."""
        return self.scheduler.pin(prefix_name(token_ids, cache_salt), token_ids, seconds, cache_salt)

    def unpin(self, name: str) -> bool:
        """End a pin, an operator's or a request's; False when there is none of that name."""
        return self.scheduler.unpin(name)

    def list_pins(self) -> list[dict[str, Any]]:
        """The pins there are."""
        return self.scheduler.list_pins()

    def memory(self) -> dict[str, int]:
        """KV blocks by state, the token slots that running sequences hold and use, and bytes as measured."""
        stats, pool = self.scheduler.stats(), self.scheduler.pool
        return {
            "in_use": pool.num_blocks - pool.num_free,
            "cached": pool.num_free - pool.num_empty,
            "free": pool.num_empty,
            "slots_held": stats.kv_slots_held,
            "tokens_held": stats.kv_tokens_held,
            "forks": stats.num_forks,
            "forked_tokens": stats.forked_tokens,
            **self.scheduler.tier_figures(),
            **(self.account.figures() if self.account is not None else {}),
        }

    def explain(self, request_ids: list[str]) -> list[dict[str, Any]]:
        """What became of requests, those that are still known."""
        found = (self.scheduler.journal.explain(request_id) for request_id in request_ids)
        return [answer for answer in found if answer is not None]

    def shutdown(self) -> None:
        self._grammars.shutdown()
        if self.adapters is not None:
            self.adapters.shutdown()
        if self.scheduler.tiers is not None:
            self.scheduler.tiers.close()
        if self._publisher is not None:
            self._publisher.close()
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
        tenant_weights=tuple(config.tenant_weights.items()),
        tenant_cache_floor=config.tenant_cache_floor,
        tenant_cache_cap=config.tenant_cache_cap,
        long_prefill_token_threshold=config.long_prefill_token_threshold,
        seed=config.seed,
        copies_blocks=config.copies_blocks,
        max_loras=config.max_loras,
        speculates=config.speculation != "off",
    )
