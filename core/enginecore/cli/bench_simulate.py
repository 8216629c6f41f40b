"""A simulated device under drawn traffic, in virtual time: the real engine, as fast as this host can plan."""

from __future__ import annotations

import gc
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

import msgspec

from enginecore.cli.bench_report import peak_rss_bytes, percentiles, stamp
from enginecore.cli.bench_throughput import StepTally
from enginecore.cli.bench_traffic import Traffic, draw_requests
from enginecore.clock import VirtualClock
from enginecore.config import EngineArgs
from enginecore.device.discovery import discover
from enginecore.errors import ParameterError
from enginecore.frontend.fingerprint import fingerprint
from enginecore.parallel.executor import Executor, Overlapping
from enginecore.plan import StepPlan, StepResult
from enginecore.request import EngineRequest, EngineStats, StepOutputs

if TYPE_CHECKING:
    from enginecore.engine.engine import Engine

#: Points of the timeline in a report.
MAX_POINTS = 200


class TimedExecutor:
    """An executor whose share of the time is known."""

    def __init__(self, executor: Executor) -> None:
        self._executor = executor
        self.taken_s = 0.0

    def execute(self, plan: StepPlan) -> StepResult:
        begun = time.perf_counter()
        result = self._executor.execute(plan)
        self.taken_s += time.perf_counter() - begun
        return result

    def submit(self, plan: StepPlan) -> Any:
        assert isinstance(self._executor, Overlapping)
        begun = time.perf_counter()
        handle = self._executor.submit(plan)
        self.taken_s += time.perf_counter() - begun
        return handle

    def collect(self, handle: Any) -> StepResult:
        assert isinstance(self._executor, Overlapping)
        begun = time.perf_counter()
        result = self._executor.collect(handle)
        self.taken_s += time.perf_counter() - begun
        return result

    def reference_ops(self) -> list[str]:
        return self._executor.reference_ops()

    def shutdown(self) -> None:
        self._executor.shutdown()


class TimedEngine:
    """An engine whose time is known by part: `add_s` taking requests in, `runner.taken_s` executing plans,
    `scheduler_s` the rest of all steps, `last_s` of the last one. Elapsed time, because asking for processor time so
    often would cost more than many a step."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.clock = engine.clock
        self.runner = TimedExecutor(engine.executor)
        engine.executor = self.runner
        self.add_s = self.scheduler_s = self.last_s = 0.0

    def add(self, request: EngineRequest) -> None:
        begun = time.perf_counter()
        self._engine.add(request)
        self.add_s += time.perf_counter() - begun

    def has_work(self) -> bool:
        return self._engine.has_work()

    def step(self) -> StepOutputs:
        begun, executed = time.perf_counter(), self.runner.taken_s
        outputs = self._engine.step()
        self.last_s = time.perf_counter() - begun - (self.runner.taken_s - executed)
        self.scheduler_s += self.last_s
        return outputs


@dataclass
class Timeline:
    """State after each step: virtual seconds, requests waiting and running, share of the KV blocks in use."""

    at_s: list[float] = field(default_factory=list)
    waiting: list[int] = field(default_factory=list)
    running: list[int] = field(default_factory=list)
    kv_usage: list[float] = field(default_factory=list)

    def note(self, now: float, stats: EngineStats) -> None:
        self.at_s.append(now)
        self.waiting.append(stats.num_waiting)
        self.running.append(stats.num_running)
        self.kv_usage.append(stats.num_used_blocks / stats.num_blocks)

    def columns(self, most: int = MAX_POINTS) -> dict[str, Sequence[float]]:
        """At most `most` points, evenly taken."""
        step = max(1, -(-len(self.at_s) // most))
        return {
            "at_s": self.at_s[::step],
            "waiting": self.waiting[::step],
            "running": self.running[::step],
            "kv_usage": self.kv_usage[::step],
        }


@dataclass
class Journeys:
    """First and last token of each request, in virtual seconds."""

    first: dict[str, float] = field(default_factory=dict)
    last: dict[str, float] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)

    def note(self, now: float, outputs: StepOutputs) -> None:
        first = self.first
        for output in outputs.outputs:
            name = output.request_id
            if name not in first:
                first[name] = now
            if output.finish_reason is not None:
                self.last[name] = now
                if output.error is not None:
                    self.failed[name] = output.error

    def figures(self, requests: Sequence[EngineRequest]) -> dict[str, Any]:
        """Percentiles over the requests that did not fail; `normalized_latency_s` is the mean over them of the time
        from arrival to end for each token of the answer, as in the paper on PagedAttention."""
        served = [request for request in requests if request.request_id not in self.failed]
        e2e = [self.last[r.request_id] - r.arrival_time for r in served]
        several = [r for r in served if r.max_tokens > 1]
        decode = [(self.last[r.request_id] - self.first[r.request_id]) / (r.max_tokens - 1) for r in several]
        per_token = [seconds / request.max_tokens for seconds, request in zip(e2e, served, strict=True)]
        return {
            "ttft_ms": percentiles([1000 * (self.first[r.request_id] - r.arrival_time) for r in served]),
            "tpot_ms": percentiles([1000 * seconds for seconds in decode]),
            "e2e_ms": percentiles([1000 * seconds for seconds in e2e]),
            "normalized_latency_s": sum(per_token) / len(per_token) if per_token else None,
        }


def simulated_device() -> str:
    """The full name of the installed simulated device; ParameterError when there is none, or more than one."""
    found = [
        plugin.full_name(device)
        for plugin in discover()
        if plugin.manifest is not None and plugin.manifest.simulated
        for device in plugin.devices
    ]
    if len(found) != 1:
        raise ParameterError(
            f"a simulation needs one simulated device; installed: {', '.join(found) or 'none'}",
            param="device",
            fix="choose one with --device" if found else "pip install enginecore-sim",
        )
    return found[0]


def measure_simulation(engine: EngineArgs, traffic: Traffic) -> tuple[dict[str, Any], Timeline]:
    """Run the traffic to its end in virtual time: figures of the simulated device and of this host's work."""
    from enginecore.engine.build import build_engine

    clock = VirtualClock()
    if engine.device == "auto":
        engine = msgspec.structs.replace(engine, device=simulated_device())
    loop, ready = build_engine(engine, clock)
    config = ready.config
    requests = draw_requests(traffic, vocab_size=config.vocab_size, max_model_len=config.max_model_len)
    gc.collect()
    gc.freeze()  # the requests stay: collections need not look through them again and again
    try:
        run = _run(loop, requests, config.max_num_seqs)
    finally:
        gc.unfreeze()
        loop.shutdown()
    report = {
        "benchmark": "simulate",
        **asdict(traffic),
        **_device_figures(run, requests, clock),
        "host": run.host,
        "ledger": ready.ledger,
        "timeline": run.timeline.columns(),
        "settings": msgspec.to_builtins(config),
        **stamp(fingerprint(ready)),
    }
    return report, run.timeline


@dataclass
class _Run:
    host: dict[str, Any] = field(default_factory=dict)
    tally: StepTally = field(default_factory=StepTally)
    timeline: Timeline = field(default_factory=Timeline)
    journeys: Journeys = field(default_factory=Journeys)


def _run(engine: Engine, requests: Sequence[EngineRequest], max_num_seqs: int) -> _Run:
    """All steps. The scheduler's time is what a step costs beside its execution; a step is full when at least nine
    tenths of the slots are running. Parts are elapsed times, scaled by the processor's share in the whole run."""
    from enginecore.engine.replay import replay

    run, timed = _Run(), TimedEngine(engine)
    full_s, full_running = 0.0, 0
    wall, begun = time.perf_counter(), time.process_time()
    for now, outputs in replay(timed, requests):
        if outputs.stats.num_running >= 0.9 * max_num_seqs:
            full_s += timed.last_s
            full_running += outputs.stats.num_running
        run.tally.count(outputs.stats)
        run.timeline.note(now, outputs.stats)
        run.journeys.note(now, outputs)
    wall_s, cpu_s = time.perf_counter() - wall, time.process_time() - begun
    share = min(1.0, cpu_s / wall_s)
    running, scheduler_s = sum(run.timeline.running), timed.scheduler_s * share
    run.host = {
        "wall_s": wall_s,
        "cpu_s": cpu_s,
        "scheduler_cpu_s": scheduler_s,
        "runner_cpu_s": timed.runner.taken_s * share,
        "add_us_per_request": 1e6 * timed.add_s * share / len(requests),
        "scheduler_us_per_step": 1e6 * scheduler_s / max(1, len(run.timeline.at_s)),
        "scheduler_us_per_running_request": 1e6 * scheduler_s / max(1, running),
        "scheduler_us_per_running_request_when_full": 1e6 * full_s * share / full_running if full_running else None,
        "peak_rss_bytes": peak_rss_bytes(),
    }
    return run


def _device_figures(run: _Run, requests: Sequence[EngineRequest], clock: VirtualClock) -> dict[str, Any]:
    """What a user of the simulated device would see, in virtual time."""
    stats, timeline = run.tally.last or EngineStats(), run.timeline
    seconds, steps = clock.now(), max(1, len(timeline.at_s))
    failed = run.journeys.failed
    input_tokens = sum(len(request.prompt_token_ids) for request in requests if request.request_id not in failed)
    output_tokens = stats.generation_tokens

    def rate(count: float) -> float | None:
        return count / seconds if seconds else None

    return {
        "num_failed": len(failed),
        "virtual_s": seconds,
        "input_tokens": input_tokens,
        "output_tokens": output_tokens,
        "output_tok_per_s": rate(output_tokens),
        "total_tok_per_s": rate(input_tokens + output_tokens),
        "requests_per_s": rate(len(requests) - len(failed)),
        **run.journeys.figures(requests),
        "device_busy": rate(clock.busy_s),
        "num_steps": stats.num_steps,
        "mean_running": sum(timeline.running) / steps,
        "peak_running": run.tally.peak_running,
        "peak_waiting": max(timeline.waiting, default=0),
        "num_preemptions": stats.num_preemptions,
        "prefix_cache_hit_rate": stats.prefix_cache_hits / max(1, stats.prefix_cache_queries),
        "mean_kv_usage": sum(timeline.kv_usage) / steps,
        "peak_kv_usage": max(timeline.kv_usage, default=0.0),
        "kv_waste": run.tally.kv_waste,
    }
