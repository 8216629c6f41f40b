"""An accelerator that exists only as books: the `Runtime` of `enginecore.device.accelerator` over host tensors.

It proves a plugin's host logic on any machine: allocations count against a capacity and fail beyond it, streams and
events keep the order that a device would give their work, captures fail when told to, and a captured graph really reads
its static inputs and overwrites its outputs.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class FakeStream:
    """`history` names all work that has ended before whatever the stream is given next."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.history: set[str] = set()


class FakeEvent:
    def __init__(self, runtime: FakeRuntime) -> None:
        self._runtime = runtime
        self._reached: set[str] = set()

    def record(self, stream: FakeStream | None = None) -> None:
        self._reached = set((stream or self._runtime.current_stream()).history)

    def wait(self, stream: FakeStream | None = None) -> None:
        (stream or self._runtime.current_stream()).history |= self._reached

    def synchronize(self) -> None:
        self._runtime.host.history |= self._reached

    def query(self) -> bool:
        return self._reached <= self._runtime.host.history


class FakeGraph:
    """The operations that torch dispatched while recording, run again on the same tensors."""

    def __init__(self, runtime: FakeRuntime) -> None:
        self._runtime = runtime
        self.operations: list[tuple[Any, tuple[Any, ...], dict[str, Any], Any]] = []
        self.was_reset = False
        self.num_bytes = 0

    def replay(self) -> None:
        assert not self.was_reset, "a graph was replayed after its memory was given back"
        for function, args, kwargs, recorded in self.operations:
            for old, new in zip(_tensors(recorded), _tensors(function(*args, **kwargs)), strict=True):
                if old is not new:
                    old.copy_(new)

    def reset(self) -> None:
        self._runtime.give_back(self.num_bytes)
        self.was_reset, self.operations, self.num_bytes = True, [], 0


class _Recorder(TorchDispatchMode):  # type: ignore[misc]
    def __init__(self, graph: FakeGraph) -> None:
        super().__init__()
        self._graph = graph

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if not func.name().startswith("aten::empty"):  # memory is taken once, and has no content to bring back
            self._graph.operations.append((func, args, kwargs or {}, out))
        return out


def _tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    return [tensor for item in value for tensor in _tensors(item)] if isinstance(value, (list, tuple)) else []


class FakeRuntime:
    """`total` bytes on each of `count` devices, of which other processes hold `others`.

    `capture_fails`: None, or the text of the error of the next captures. `graph_bytes`: what a graph takes of a pool
    that is new, and `graph_bytes // 16` of one that is not. `events` lists ("allocate" | "free" | ..., bytes).
    """

    kind = "cpu"

    def __init__(self, total: int = 2**30, *, count: int = 1, others: int = 0, graphs: bool = True) -> None:
        self.total, self.count, self.others, self._graphs = total, count, others, graphs
        self.index = 0
        self.reserved = self.cached = self.peak = 0
        self.capture_fails: str | None = None
        self.graph_bytes = 2**20
        self.events: list[tuple[str, int]] = []
        self.host = FakeStream("host")
        self.main = FakeStream("main")
        self._stream = self.main
        self._names = itertools.count()
        self._pools: set[int] = set()
        #: Allocations that were made here; others, as those of a model's weights, are not counted.
        #: Held, so that their numbers are not given out again.
        self._counted: dict[int, Any] = {}
        self.seeds: list[int] = []

    # ---- devices and books -----------------------------------------------------------------------------------------

    def device_count(self) -> int:
        return self.count

    def select(self, index: int) -> None:
        self.index = index

    def device(self) -> torch.device:
        return torch.device("cpu")

    def properties(self) -> Any:
        return SimpleNamespace(name="a fake", total_memory=self.total)

    def memory_info(self) -> tuple[int, int]:
        return self.total - self.others - self.reserved - self.cached, self.total

    def reserved_bytes(self) -> int:
        return self.reserved + self.cached

    def peak_bytes(self) -> int:
        return self.peak

    def reset_peak(self) -> None:
        self.peak = self.reserved_bytes()

    def empty_cache(self) -> None:
        self.events.append(("empty_cache", self.cached))
        self.cached = 0

    def _grow(self, num_bytes: int, *, cached: bool = True) -> None:
        reused = min(self.cached, num_bytes) if cached else 0
        free = self.memory_info()[0]
        if num_bytes - reused > free:
            raise torch.OutOfMemoryError(
                f"out of memory. Tried to allocate {num_bytes} bytes; {free} of {self.total} are free"
            )
        self.cached -= reused
        self.reserved += num_bytes
        self.peak = max(self.peak, self.reserved_bytes())

    def allocate(self, num_bytes: int) -> torch.Tensor:
        self._grow(num_bytes)
        self.events.append(("allocate", num_bytes))
        tensor = torch.empty(num_bytes, dtype=torch.uint8)
        storage = tensor.untyped_storage()
        self._counted[storage._cdata] = storage
        return tensor

    def give_back(self, num_bytes: int) -> None:
        """Freed memory is cached, as torch's allocators do, until `empty_cache`."""
        self.reserved -= num_bytes
        self.cached += num_bytes

    def resize(self, tensor: torch.Tensor, num_bytes: int) -> None:
        before = tensor.untyped_storage().nbytes()
        if tensor.untyped_storage()._cdata in self._counted:
            if num_bytes > before:
                self._grow(num_bytes - before)
            else:
                self.give_back(before - num_bytes)
        self.events.append(("resize", num_bytes - before))
        tensor.untyped_storage().resize_(num_bytes)

    def allocate_pinned(self, num_bytes: int) -> torch.Tensor:
        self.events.append(("pinned", num_bytes))
        return torch.empty(num_bytes, dtype=torch.uint8)

    # ---- streams ---------------------------------------------------------------------------------------------------

    def work(self, name: str) -> set[str]:
        """Give the current stream some work; returns the names of all that ends before it begins."""
        before = set(self._stream.history)
        self._stream.history.add(name)
        return before

    def synchronize(self) -> None:
        self.host.history |= self.main.history

    def new_stream(self) -> FakeStream:
        return FakeStream(f"side-{next(self._names)}")

    def current_stream(self) -> FakeStream:
        return self._stream

    @contextlib.contextmanager
    def on_stream(self, stream: FakeStream) -> Iterator[None]:
        self._stream, before = stream, self._stream
        try:
            yield
        finally:
            self._stream = before

    def new_event(self) -> FakeEvent:
        return FakeEvent(self)

    # ---- graphs ----------------------------------------------------------------------------------------------------

    def can_capture(self) -> bool:
        return self._graphs

    def new_graph(self) -> FakeGraph:
        return FakeGraph(self)

    def new_graph_pool(self) -> int:
        return next(self._names)

    @contextlib.contextmanager
    def capturing(self, graph: FakeGraph, pool: int) -> Iterator[None]:
        with self.on_stream(self.new_stream()), _Recorder(graph):
            yield
        if self.capture_fails is not None:
            raise RuntimeError(self.capture_fails)
        grown = self.graph_bytes if pool not in self._pools else self.graph_bytes // 16
        self._grow(grown, cached=False)  # a pool's memory is its own
        graph.num_bytes = grown
        self._pools.add(pool)

    def manual_seed(self, seed: int) -> None:
        self.seeds.append(seed)
        torch.manual_seed(seed)
