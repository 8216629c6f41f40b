"""Requests that arrive over time, fed to an engine by its own clock: a trace of traffic, in real or in virtual time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

from enginecore.clock import Clock
from enginecore.request import EngineRequest, StepOutputs


class Steppable(Protocol):
    """What a replay drives: an `Engine`, or something around one."""

    @property
    def clock(self) -> Clock: ...

    def add(self, request: EngineRequest) -> None: ...

    def has_work(self) -> bool: ...

    def step(self) -> StepOutputs: ...


def replay(engine: Steppable, requests: Sequence[EngineRequest]) -> Iterator[tuple[float, StepOutputs]]:
    """Add each request when the engine's clock reaches its `arrival_time` (seconds from now), and step while there is
    work. Yields (seconds from the start, outputs) after each step. Requests of the same moment keep their order.
    """
    clock = engine.clock
    start = clock.now()
    coming = sorted(requests, key=lambda request: request.arrival_time)
    added = 0
    while added < len(coming) or engine.has_work():
        now = clock.now()
        while added < len(coming) and start + coming[added].arrival_time <= now:
            engine.add(coming[added])
            added += 1
        if engine.has_work():
            outputs = engine.step()
            yield clock.now() - start, outputs
        else:
            clock.wait_until(start + coming[added].arrival_time)
