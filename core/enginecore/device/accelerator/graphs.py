"""Captured steps that share one pool of memory, largest batch first.

A pool grows with the largest graph; smaller ones, captured after it, find their memory there already. So the cost of a
graph that has not been captured is told from those that have: what the first took, and the little each later one added.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from enginecore.device.accelerator.runtime import Graph, Runtime
from enginecore.device.graphs import GraphKey, GraphRunner
from enginecore.errors import DeviceError

MIB = 2**20
#: What a graph adds beside activations, as long as nothing is measured: its kernels' parameters and small buffers.
GRAPH_BYTES = 4 * MIB


class GraphCaptureError(DeviceError):
    """A step could not be captured; it runs eagerly instead."""


@dataclass(frozen=True)
class Captured:
    """A graph, what its function returned, and what keeps its addresses alive."""

    graph: Graph
    output: Any
    inputs: dict[str, Any]


class PooledGraphs(GraphRunner):
    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._pool: Any = None
        self._stream: Any = None
        self._captured: list[Captured] = []
        #: Bytes that each capture added, in order.
        self._grown: list[int] = []

    def plan(self, keys: list[GraphKey], budget_bytes: int) -> list[GraphKey]:
        """As many of `keys` as fit into `budget_bytes` with what is captured already; small batches, which gain most,
        go before large ones. They come largest first, which is the order to capture in."""
        later = self._grown[1:]
        each = max(sum(later) // len(later), MIB // 8) if later else GRAPH_BYTES
        held = self.memory_bytes()
        chosen: list[GraphKey] = []
        for key in sorted(set(keys)):
            pool = max([*self._grown[:1], key.activation_bytes])  # the largest graph's, shared by all
            if held + (0 if self._grown else pool) + each * (len(chosen) + 1) > budget_bytes:
                break
            chosen.append(key)
        return chosen[::-1]

    def capture(self, key: GraphKey, fn: Callable[..., Any], static_inputs: dict[str, Any]) -> Captured:
        """Raises GraphCaptureError with the device's reason; what was captured before stays good."""
        runtime = self._runtime
        self._warm_up(fn, static_inputs)
        if self._pool is None:
            self._pool = runtime.new_graph_pool()
        before, graph = runtime.reserved_bytes(), runtime.new_graph()
        try:
            with runtime.capturing(graph, self._pool):
                output = fn(**static_inputs)
        except Exception as error:
            self._drop(graph)
            raise GraphCaptureError(f"the step {key} cannot be captured: {type(error).__name__}: {error}") from error
        captured = Captured(graph, output, static_inputs)
        self._captured.append(captured)
        self._grown.append(max(0, runtime.reserved_bytes() - before))
        return captured

    def _warm_up(self, fn: Callable[..., Any], static_inputs: dict[str, Any]) -> None:
        """Once on a stream of its own, as recording happens on one: workspaces and libraries that load lazily must not
        come while recording. The inputs must be there before it runs."""
        runtime = self._runtime
        if self._stream is None:
            self._stream = runtime.new_stream()
        ready = runtime.new_event()
        ready.record()
        ready.wait(self._stream)
        with runtime.on_stream(self._stream):
            fn(**static_inputs)
        runtime.synchronize()
        # torch empties its cache when a recording begins: done here, the growth that is measured is the graph's own.
        runtime.empty_cache()

    def _drop(self, graph: Graph) -> None:
        """After a failed capture: neither the graph nor a stream in capture mode may be left behind."""
        with contextlib.suppress(Exception):  # what was never a whole graph may refuse
            graph.reset()
        if not self._captured:
            self._pool = None
        self._runtime.synchronize()
        self._runtime.empty_cache()

    def replay(self, handle: Captured) -> Any:
        """What `fn` returned, filled anew. It lies in the shared pool: use it before the next replay."""
        handle.graph.replay()
        return handle.output

    def memory_bytes(self) -> int:
        return sum(self._grown)

    def release(self) -> None:
        self._runtime.synchronize()
        for captured in self._captured:
            captured.graph.reset()
        self._captured, self._grown, self._pool = [], [], None
        self._runtime.empty_cache()
