"""The part of a `Backend` that all accelerators under torch have in common: device, streams, events, shutdown."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from enginecore.device.accelerator.guards import GuardedAttention
from enginecore.device.accelerator.runtime import Runtime
from enginecore.device.accelerator.transfer import BlockMover
from enginecore.device.backend import Backend
from enginecore.errors import DriverMissingError

if TYPE_CHECKING:
    import torch


def collectives_of(library: str) -> str | None:
    """`library` if this torch was built with it None otherwise."""
    import torch.distributed as distributed

    return library if distributed.is_available() and distributed.is_backend_available(library) else None


class AcceleratorBackend(Backend):
    """A plugin's backend calls `super().__init__`, then sets capabilities, memory, attention, ops and graphs.

    `collective_backend` is torch.distributed's name for the device's library of collectives, None without one.
    `name` is the device's short name and `hint` what to say of an index that does not exist (a mask of visible devices,
    say).
    """

    collective_backend: str | None = None

    def __init__(self, name: str, runtime: Runtime, index: int, hint: str = "") -> None:
        self.name, self.runtime_api, self._hint = name, runtime, hint
        self._side_stream: Any = None
        self.mover: BlockMover | None = None
        self.set_device(index)

    def attach_mover(self, attention: GuardedAttention) -> None:
        """Let blocks that are swapped travel beside the step."""
        self.mover = BlockMover(self.runtime_api, attention.plain_swap)
        attention.swap = self.mover.swap

    def torch_device(self) -> torch.device:
        return self.runtime_api.device()

    def set_device(self, index: int) -> None:
        count = self.runtime_api.device_count()
        if not 0 <= index < count:
            seen = (
                f"{self.name}:0 to {self.name}:{count - 1}" if count > 1 else f"only {self.name}:0" if count else "none"
            )
            raise DriverMissingError(
                f"{self.name}:{index} does not exist: {seen} can be seen{self._hint and f' ({self._hint})'}",
                fix="enginecore devices lists them",
            )
        self.runtime_api.select(index)

    def synchronize(self) -> None:
        self.runtime_api.synchronize()

    def stream(self) -> Any:
        if self._side_stream is None:
            self._side_stream = self.runtime_api.new_stream()
        return self.runtime_api.on_stream(self._side_stream)

    def event(self) -> Any:
        return self.runtime_api.new_event()

    def manual_seed(self, seed: int) -> None:
        self.runtime_api.manual_seed(seed)

    def shutdown(self) -> None:
        """Finish what was given to the device, then return cached memory to the driver."""
        self.runtime_api.synchronize()
        if self.graphs is not None:
            self.graphs.release()
        if self.collectives is not None:
            self.collectives.destroy()
        self.runtime_api.empty_cache()
