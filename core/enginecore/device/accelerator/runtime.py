"""One vocabulary for what torch offers of an accelerator: memory, streams, events, graphs.

`TorchRuntime` speaks it over any of torch's device modules, which have the same functions. Tests put an object in its
place that keeps books in plain Python and fails when told to: allocator budget, order of streams and failing captures
are proved that way, on any machine.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import torch


class Event(Protocol):
    """A point in a stream's work."""

    def record(self, stream: Any = None) -> None:
        """Set it behind the work that `stream` (None: the current one) was given so far."""

    def wait(self, stream: Any = None) -> None:
        """Let `stream` (None: the current one) go on only once the event is reached. The host does not wait."""

    def synchronize(self) -> None:
        """Let the host wait."""

    def query(self) -> bool: ...


class Graph(Protocol):
    def replay(self) -> None: ...

    def reset(self) -> None:
        """Give up what the graph holds."""


class Runtime(Protocol):
    """The device that `select` chose. Bytes everywhere."""

    #: torch's name for the kind of device, as in `torch.device(kind, index)`.
    kind: str

    def device_count(self) -> int: ...

    def select(self, index: int) -> None: ...

    def device(self) -> torch.device: ...

    def properties(self) -> Any:
        """What torch tells of the device: name, sizes, architecture."""

    def memory_info(self) -> tuple[int, int]:
        """(free, total) of the device or the partition of it that this process sees, over all processes."""

    def reserved_bytes(self) -> int:
        """What this process's allocator holds of the device, cached memory included."""

    def peak_bytes(self) -> int:
        """The largest `reserved_bytes` since `reset_peak`."""

    def reset_peak(self) -> None: ...

    def empty_cache(self) -> None: ...

    def allocate(self, num_bytes: int) -> torch.Tensor:
        """uint8 [num_bytes] on the device."""

    def resize(self, tensor: torch.Tensor, num_bytes: int) -> None:
        """Give the allocation under `tensor` this many bytes; 0 returns its memory to the allocator."""

    def allocate_pinned(self, num_bytes: int) -> torch.Tensor:
        """uint8 [num_bytes] in host memory that the device copies from without staging."""

    def synchronize(self) -> None: ...

    def new_stream(self) -> Any: ...

    def current_stream(self) -> Any: ...

    def on_stream(self, stream: Any) -> AbstractContextManager[Any]:
        """Work inside the block goes to `stream`."""

    def new_event(self) -> Event: ...

    def can_capture(self) -> bool:
        """Whether this build of torch records graphs on the device."""

    def new_graph(self) -> Graph: ...

    def new_graph_pool(self) -> Any: ...

    def capturing(self, graph: Graph, pool: Any) -> AbstractContextManager[Any]:
        """Work inside the block is recorded into `graph` and not run; its memory comes from `pool`."""

    def manual_seed(self, seed: int) -> None: ...


class TorchRuntime:
    """A `Runtime` over one of torch's device modules, which the plugin passes in.

    `graph_class` names the module's class of graphs; where the module has none, nothing can be captured.
    `capture_options` go to the module's `graph`.
    """

    def __init__(self, module: Any, kind: str, graph_class: str, **capture_options: Any) -> None:
        self._module, self.kind, self._graph_class, self._index = module, kind, graph_class, 0
        self._capture_options = capture_options

    def device_count(self) -> int:
        return int(self._module.device_count())

    def select(self, index: int) -> None:
        self._module.set_device(index)
        self._index = index

    def device(self) -> torch.device:
        import torch

        return torch.device(self.kind, self._index)

    def properties(self) -> Any:
        return self._module.get_device_properties(self._index)

    def memory_info(self) -> tuple[int, int]:
        free, total = self._module.mem_get_info(self._index)
        return int(free), int(total)

    def reserved_bytes(self) -> int:
        return int(self._module.memory_reserved(self._index))

    def peak_bytes(self) -> int:
        return int(self._module.max_memory_reserved(self._index))

    def reset_peak(self) -> None:
        self._module.reset_peak_memory_stats(self._index)

    def empty_cache(self) -> None:
        self._module.empty_cache()

    def allocate(self, num_bytes: int) -> torch.Tensor:
        import torch

        return torch.empty(num_bytes, dtype=torch.uint8, device=self.device())

    def resize(self, tensor: torch.Tensor, num_bytes: int) -> None:
        tensor.untyped_storage().resize_(num_bytes)

    def allocate_pinned(self, num_bytes: int) -> torch.Tensor:
        import torch

        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)

    def synchronize(self) -> None:
        self._module.synchronize(self._index)

    def new_stream(self) -> Any:
        return self._module.Stream()

    def current_stream(self) -> Any:
        return self._module.current_stream()

    def on_stream(self, stream: Any) -> AbstractContextManager[Any]:
        context: AbstractContextManager[Any] = self._module.stream(stream)
        return context

    def new_event(self) -> Event:
        return _TorchEvent(self._module)

    def can_capture(self) -> bool:
        return all(hasattr(self._module, name) for name in (self._graph_class, "graph", "graph_pool_handle"))

    def new_graph(self) -> Graph:
        graph: Graph = getattr(self._module, self._graph_class)()
        return graph

    def new_graph_pool(self) -> Any:
        return self._module.graph_pool_handle()

    @contextmanager
    def capturing(self, graph: Graph, pool: Any) -> Iterator[None]:
        before = self.current_stream()
        try:
            with self._module.graph(graph, pool=pool, **self._capture_options):
                yield
        finally:
            # torch leaves its recording stream current when the end of a recording fails.
            self._module.set_stream(before)

    def manual_seed(self, seed: int) -> None:
        self._module.manual_seed_all(seed)


class _TorchEvent:
    """torch's own events want a stream; here None is the current one, for every module alike."""

    def __init__(self, module: Any) -> None:
        self._module, self._event = module, module.Event()

    def record(self, stream: Any = None) -> None:
        self._event.record(stream or self._module.current_stream())

    def wait(self, stream: Any = None) -> None:
        (stream or self._module.current_stream()).wait_event(self._event)

    def synchronize(self) -> None:
        self._event.synchronize()

    def query(self) -> bool:
        return bool(self._event.query())
