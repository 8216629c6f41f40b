"""Moving whole KV blocks between the device and host memory, for the tiers below the device.

Host memory holds what the device's caches hold, in the same layout: one tensor for each attention call, a slot where
the device has a block. The backend's `swap_blocks` moves them, on a stream beside the steps' where there is one, from
a thread of its own. A runtime that keeps its own cache gives and takes the bytes of a block.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from enginecore.device import Backend, KVCacheLayout, ModelRuntime


class PagedMover:
    """Slots for `num_slots` blocks of `caches`. `layouts` are the caches', one each."""

    def __init__(
        self, backend: Backend, caches: list[torch.Tensor], layouts: list[KVCacheLayout], num_slots: int
    ) -> None:
        assert backend.attention is not None
        self._backend = backend
        self._attention = backend.attention
        self._caches = caches
        self._axes = [layout.shape.index(-1) for layout in layouts]
        self.block_bytes = sum(layout.page_bytes for layout in layouts)
        self._host = [
            backend.memory.host_alloc_pinned(layout.shape_for(num_slots), getattr(torch, layout.dtype))
            for layout in layouts
        ]

    def fence(self) -> Callable[[], None]:
        event = self._backend.event()
        event.record()
        wait: Callable[[], None] = event.synchronize
        return wait

    def to_host(self, pairs: list[tuple[int, int]]) -> None:
        self._swap(self._caches, self._host, pairs)

    def to_device(self, pairs: list[tuple[int, int]]) -> None:
        self._swap(self._host, self._caches, pairs)

    @torch.inference_mode()  # type: ignore[untyped-decorator]
    def _swap(self, source: list[torch.Tensor], target: list[torch.Tensor], pairs: list[tuple[int, int]]) -> None:
        with self._backend.stream():
            self._attention.swap_blocks(source, target, pairs)
            event = self._backend.event()
            event.record()
        event.synchronize()

    def views(self, slot: int) -> list[memoryview]:
        return [
            part
            for tensor, axis in zip(self._host, self._axes, strict=True)
            for part in _parts(tensor.select(axis, slot), axis)
        ]


def _parts(block: torch.Tensor, axis: int) -> list[memoryview]:
    """The contiguous pieces of one block; one of them where blocks are the outermost dimension."""
    if axis == 0:
        return [memoryview(block.reshape(-1).view(torch.uint8).numpy())]
    return [part for inner in block for part in _parts(inner, axis - 1)]


class RuntimeMover:
    """Slots for `num_slots` blocks of a runtime that implements `export_block` and `import_block`."""

    def __init__(self, runtime: ModelRuntime, num_slots: int) -> None:
        self._runtime = runtime
        self.block_bytes = len(runtime.export_block(0))
        self._host = bytearray(num_slots * self.block_bytes)

    def fence(self) -> Callable[[], None]:
        return lambda: None

    def to_host(self, pairs: list[tuple[int, int]]) -> None:
        size = self.block_bytes
        for block, slot in pairs:
            self._host[slot * size : (slot + 1) * size] = self._runtime.export_block(block)

    def to_device(self, pairs: list[tuple[int, int]]) -> None:
        for slot, block in pairs:
            self._runtime.import_block(block, bytes(self.views(slot)[0]))

    def views(self, slot: int) -> list[memoryview]:
        return [memoryview(self._host)[slot * self.block_bytes : (slot + 1) * self.block_bytes]]


def runtime_moves_blocks(runtime: ModelRuntime) -> bool:
    """Whether a runtime implements both of the optional methods that moving blocks takes."""
    kind = type(runtime)
    return kind.export_block is not ModelRuntime.export_block and kind.import_block is not ModelRuntime.import_block
