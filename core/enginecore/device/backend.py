"""`Backend`: everything the core needs of one device, created in the worker process only."""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING, Any

from enginecore.device.attention import AttentionBackend
from enginecore.device.capabilities import Capabilities
from enginecore.device.collectives import Communicator, GroupSpec
from enginecore.device.contract import Contract, optional
from enginecore.device.graphs import GraphRunner
from enginecore.device.memory import MemoryManager
from enginecore.device.optable import OpTable
from enginecore.device.runtime import ModelRuntime

if TYPE_CHECKING:
    import torch


class Backend(Contract):
    """One device. The attributes are set by the plugin's constructor; the three at the end are optional slots.

    A backend that has a `runtime` may leave `attention` and `ops` None: the core then hands it whole batches.
    `collectives` is a group of this process alone, for a backend that keeps one; `collective_backend` names what
    torch.distributed calls the device's library ("nccl", "gloo", ...), for groups of several.
    """

    capabilities: Capabilities
    memory: MemoryManager
    attention: AttentionBackend | None
    ops: OpTable | None
    graphs: GraphRunner | None = None
    collectives: Communicator | None = None
    runtime: ModelRuntime | None = None
    collective_backend: str | None = None

    @abstractmethod
    def torch_device(self) -> torch.device:
        """The torch device that tensors of this backend live on."""

    @abstractmethod
    def set_device(self, index: int) -> None:
        """Bind this process to the device; raises DriverMissingError for an index that does not exist."""

    @abstractmethod
    def synchronize(self) -> None:
        """Wait for all work that was given to the device."""

    @abstractmethod
    def stream(self) -> Any:
        """A context manager that runs work beside the default stream; a null context where there is only one."""

    @abstractmethod
    def event(self) -> Any:
        """An object with `record()`, `synchronize()` and `query()`."""

    @abstractmethod
    def manual_seed(self, seed: int) -> None: ...

    @optional
    def communicator(self, group: GroupSpec) -> Communicator:
        """Optional. Join a group of ranks, each a process that has called `set_device`. By default through
        torch.distributed, under the name of `collective_backend`. Raises CollectiveError when the others do not come,
        NotImplementedError when the device has no collectives."""
        if self.collective_backend is None:
            raise NotImplementedError(f"{type(self).__name__} has no collectives")
        from enginecore.device.distributed import TorchCommunicator

        return TorchCommunicator(group, self.collective_backend, self.torch_device())

    @abstractmethod
    def shutdown(self) -> None:
        """Release threads, memory and handles. Called once; the backend is not used afterwards."""
