"""Paged KV memory against contiguous memory, on a simulated OPT-13B and A100: batch, rate, waste.

The device, its memory and the lengths are those of Kwon et al. (2023), sections 6.1 and 6.2: OPT-13B on one A100 with
40 GB, of which 15.7 thousand KV slots are left (table 1). Lengths are log-normal with the published means, because
distributions are not published.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from enginecore.cli.bench_kv_contiguous import POLICIES, ContiguousScheduler, reserved_tokens
from enginecore.cli.bench_kv_published import BLOCK_SIZE, MAX_MODEL_LEN, NUM_SLOTS
from enginecore.cli.bench_simulate import simulated_device
from enginecore.cli.bench_traffic import Traffic, draw_requests
from enginecore.clock import VirtualClock
from enginecore.config import EngineArgs
from enginecore.request import EngineRequest

if TYPE_CHECKING:
    from enginecore.engine.engine import Engine
    from enginecore.scheduler import Scheduler

PAGED = "paged"
ALL = (PAGED, *POLICIES)
#: Rates are compared where the mean over requests of (time from arrival to end) / (tokens of the answer) is this.
NORMALISED_LATENCY_S = 0.1
#: The same rate for all policies, as a multiple of what paging sustains: every policy's memory is full.
SAME_RATE = 1.2


@dataclass(frozen=True, kw_only=True)
class Plan:
    """`seconds` of traffic for every run, in virtual time; a search for a rate ends when it is known to a factor of
    `resolution`; `settings` are further fields of EngineArgs."""

    seconds: float = 200.0
    resolution: float = 1.03
    lengths: tuple[str, ...] = ("sharegpt", "alpaca")
    seed: int = 0
    settings: dict[str, Any] = field(default_factory=dict)


@dataclass
class Shares:
    """Time-weighted: running requests, and the memory's slots by what they are for."""

    seconds: float = 0.0
    running: float = 0.0
    tokens: float = 0.0
    later: float = 0.0
    never: float = 0.0
    held: float = 0.0

    def note(self, scheduler: Scheduler, policy: str, seconds: float) -> None:
        table, slots = scheduler.running, scheduler.running.order
        computed, final = table.num_computed_S[slots], table.max_total_S[slots] - 1
        held = table.num_blocks_S[slots] * scheduler.config.block_size
        if policy != PAGED:  # what was asked for, without the rounding to blocks that has no part in these policies
            asked = [reserved_tokens(policy, table.sequence(slot).request, MAX_MODEL_LEN) for slot in slots.tolist()]
            held = np.array(asked, np.int64)
        self.seconds += seconds
        self.running += seconds * len(slots)
        self.tokens += seconds * float(computed.sum())
        self.later += seconds * float(np.maximum(np.minimum(held, final) - computed, 0).sum())
        self.never += seconds * float(np.maximum(held - np.maximum(final, computed), 0).sum())
        self.held += seconds * float(held.sum())

    def figures(self, num_slots: int) -> dict[str, float]:
        """Shares of all slots: holding a token, to be used later by the same request, held and never used, held by
        nobody (free in pieces that are too small, or rounded up by the allocator)."""
        whole = max(self.seconds, 1e-12) * num_slots
        return {
            "mean_running": self.running / max(self.seconds, 1e-12),
            "token_states": self.tokens / whole,
            "reserved": self.later / whole,
            "internal_waste": self.never / whole,
            "external_waste": 1 - self.held / whole,
            "waste_of_held": 1 - self.tokens / self.held if self.held else 0.0,
        }


class Bench:
    """Runs of one traffic under one policy after the other. Requests are drawn anew for each rate, by the same seed."""

    def __init__(self, plan: Plan, lengths: str) -> None:
        self._plan, self._lengths = plan, lengths
        #: (rate, normalised latency) of each run by policy; None where the run was given up as too slow.
        self.curves: dict[str, list[tuple[float, float | None]]] = {policy: [] for policy in ALL}
        self.num_preemptions = 0
        self._built: Engine | None = None

    def _engine(self, policy: str) -> Engine:
        """An engine with nothing in it, at time 0. The device is built once: it keeps nothing between runs."""
        from enginecore.engine.build import build_engine
        from enginecore.scheduler import Scheduler

        if self._built is None:
            self._built, _ = build_engine(EngineArgs(**self._settings()), VirtualClock())
        engine, config = self._built, self._built.scheduler.config
        engine.clock = VirtualClock()
        engine.scheduler = Scheduler(config) if policy == PAGED else ContiguousScheduler(config, policy)
        return engine

    def close(self) -> None:
        if self._built is not None:
            self._built.shutdown()

    def _settings(self) -> dict[str, Any]:
        settings: dict[str, Any] = {
            "model": "opt-13b", "device": simulated_device(), "dtype": "float16", "max_model_len": MAX_MODEL_LEN,
            "device_options": {"output": "hash", "profile": "a100-40g"}, "block_size": BLOCK_SIZE,
            "num_blocks": NUM_SLOTS // BLOCK_SIZE, "max_num_seqs": 256, "max_num_batched_tokens": 2048,
            "enable_prefix_caching": False,
        }  # fmt: skip
        return {**settings, **self._plan.settings}

    def _requests(self, rate: float) -> list[EngineRequest]:
        count = max(20, round(rate * self._plan.seconds))
        traffic = Traffic(num_requests=count, lengths=self._lengths, rate=rate, seed=self._plan.seed)
        return draw_requests(traffic, vocab_size=1000, max_model_len=MAX_MODEL_LEN)

    def latency(self, policy: str, rate: float) -> float | None:
        """Normalised latency at a rate; None as soon as it is sure to be above the limit."""
        from enginecore.engine.replay import replay

        requests = self._requests(rate)
        lengths = {request.request_id: (request.arrival_time, request.max_tokens) for request in requests}
        limit, total, known = NORMALISED_LATENCY_S * len(requests), 0.0, 0
        for now, outputs in replay(self._engine(policy), requests):
            for output in outputs.outputs:
                if output.finish_reason is not None:
                    arrival, count = lengths[output.request_id]
                    total += (now - arrival) / count
                    known += 1
            if total > limit:
                break
        answer = total / known if known == len(requests) else None
        self.curves[policy].append((rate, answer))
        return answer

    def sustained(self, policy: str, guess: float) -> float:
        """The highest rate whose normalised latency is within the limit."""

        def within(rate: float) -> bool:
            return self.latency(policy, rate) is not None

        low = high = guess
        if within(guess):
            while within(high := 1.5 * low):
                low = high
        else:
            while not within(low := high / 1.5):
                high = low
        while high / low > self._plan.resolution:
            middle = (low * high) ** 0.5
            low, high = (middle, high) if within(middle) else (low, middle)
        return low

    def full(self, policy: str, rate: float) -> dict[str, float]:
        """Figures of a memory that is full: from a quarter of the traffic on, until the last request arrives."""
        from enginecore.engine.replay import replay

        engine, requests, shares, before = self._engine(policy), self._requests(rate), Shares(), 0.0
        end = requests[-1].arrival_time
        for now, outputs in replay(engine, requests):
            if now > end:
                break
            if before > end / 4:
                shares.note(engine.scheduler, policy, now - before)
            before = now
            if policy == PAGED:
                self.num_preemptions = outputs.stats.num_preemptions
        return shares.figures(NUM_SLOTS // BLOCK_SIZE * BLOCK_SIZE)


def measure_policies(plan: Plan, tell: Callable[[str], None] = lambda text: None) -> dict[str, Any]:
    """For each distribution of lengths: rates, batches and waste of each policy, and the runs that led there."""
    answer: dict[str, Any] = {}
    for lengths in plan.lengths:
        bench = Bench(plan, lengths)
        rates: dict[str, float] = {}
        guess = 2.0 if lengths == "sharegpt" else 12.0
        for policy in ALL:
            gc.collect()
            rates[policy] = guess = bench.sustained(policy, guess)
            tell(f"{lengths}, {policy}: {guess:.2f} requests/s at {NORMALISED_LATENCY_S} s a token")
        rate = SAME_RATE * rates[PAGED]
        figures = {policy: {"sustained_rate": rates[policy], **bench.full(policy, rate)} for policy in ALL}
        bench.close()
        curves = {policy: sorted(points, key=lambda point: point[0]) for policy, points in bench.curves.items()}
        answer[lengths] = {
            "same_rate": rate,
            "policies": figures,
            "preemptions_of_paged": bench.num_preemptions,
            "curves": curves,
        }
    return answer


def ratios(figures: dict[str, Any], key: str, to: Iterable[str] = ("oracle", "max")) -> dict[str, float]:
    """How many times a policy's figure paging's is."""
    policies = figures["policies"]
    return {name: policies[PAGED][key] / policies[name][key] for name in to}
