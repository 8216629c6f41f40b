"""`Backend`: everything the core needs of one device, created in the worker process only."""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING, Any

from enginecore.device.attention import AttentionBackend
from enginecore.device.capabilities import Capabilities
from enginecore.device.collectives import Communicator
from enginecore.device.contract import Contract
from enginecore.device.graphs import GraphRunner
from enginecore.device.memory import MemoryManager
from enginecore.device.optable import OpTable
from enginecore.device.runtime import ModelRuntime

if TYPE_CHECKING:
    import torch


class Backend(Contract):
    """One device. The attributes are set by the plugin's constructor; the three at the end are optional slots.

    A backend that has a `runtime` may leave `attention` and `ops` None: the core then hands it whole batches.
    """

    capabilities: Capabilities
    memory: MemoryManager
    attention: AttentionBackend | None
    ops: OpTable | None
    graphs: GraphRunner | None = None
    collectives: Communicator | None = None
    runtime: ModelRuntime | None = None

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

    @abstractmethod
    def shutdown(self) -> None:
        """Release threads, memory and handles. Called once; the backend is not used afterwards."""
