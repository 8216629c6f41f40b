"""Arrays of a step on their way to the device, and its results on their way back.

Transfers        the host waits for each: where the device's work is done when its call returns, and by default
StagedTransfers  the host waits for none: arrays that go together are packed into pinned memory and sent as one copy
                 in the order of the device's work, results come back behind the work that makes them
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from enginecore.device import Backend

#: Copies that may be under way at once: those of three steps, which is more than there can be.
NUM_STAGES = 12
#: Each array begins at a multiple of this many bytes, as memory of the device's own allocator does.
ALIGNMENT = 256

Fetched = Callable[[], list[torch.Tensor]]


class Transfers:
    def __init__(self, device: torch.device) -> None:
        self._device = device

    #: Whether the device may still be at earlier steps when a later one is prepared.
    asynchronous = False

    def send(self, *arrays: np.ndarray) -> list[torch.Tensor]:
        """The arrays as tensors of the device."""
        return [torch.from_numpy(np.ascontiguousarray(array)).to(self._device) for array in arrays]

    def fetch(self, *tensors: torch.Tensor) -> Fetched:
        """What gives the tensors on the host, once; it waits until they are there."""
        return lambda: list(tensors)


class _Stage:
    """Pinned memory of one copy, and when the copy has read it."""

    def __init__(self, sent: Any) -> None:
        self.sent = sent
        self.in_use = False
        self.host = torch.empty(0, dtype=torch.uint8)


class StagedTransfers(Transfers):
    """For backends that claim `asynchronous`."""

    asynchronous = True

    def __init__(self, backend: Backend) -> None:
        super().__init__(backend.torch_device())
        self._event, self._pinned = backend.event, backend.memory.host_alloc_pinned
        self._stages = [_Stage(backend.event()) for _ in range(NUM_STAGES)]
        self._next = 0

    def send(self, *arrays: np.ndarray) -> list[torch.Tensor]:
        places, total = [], 0
        for array in arrays:
            places.append(total)
            total += -(-array.nbytes // ALIGNMENT) * ALIGNMENT
        stage = self._stages[self._next]
        self._next = (self._next + 1) % NUM_STAGES
        if stage.in_use:
            stage.sent.synchronize()
        if len(stage.host) < total:
            stage.host = self._pinned((1 << (total - 1).bit_length(),), torch.uint8)
        host = stage.host.numpy()
        for array, at in zip(arrays, places, strict=True):
            host[at : at + array.nbytes] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        packed = torch.empty(total, dtype=torch.uint8, device=self._device)
        packed.copy_(stage.host[:total], non_blocking=True)
        stage.sent.record()
        stage.in_use = True
        return [
            packed[at : at + array.nbytes].view(_torch_dtype(array.dtype)).view(array.shape)
            for array, at in zip(arrays, places, strict=True)
        ]

    def fetch(self, *tensors: torch.Tensor) -> Fetched:
        hosts = []
        for tensor in tensors:
            host = self._pinned(tuple(tensor.shape), tensor.dtype)
            host.copy_(tensor, non_blocking=True)
            hosts.append(host)
        arrived = self._event()
        arrived.record()

        def get() -> list[torch.Tensor]:
            arrived.synchronize()
            return hosts

        return get


def _torch_dtype(dtype: np.dtype[Any]) -> torch.dtype:
    return torch.from_numpy(np.empty(0, dtype)).dtype
