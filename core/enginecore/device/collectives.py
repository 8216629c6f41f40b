"""The collective part of the contract (an optional slot of a backend)."""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING

from enginecore.device.contract import Contract, optional

if TYPE_CHECKING:
    import torch


class Communicator(Contract):
    """Collectives over the ranks of one group. Every call takes and returns tensors on the device."""

    @abstractmethod
    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor: ...

    @abstractmethod
    def all_gather(self, tensor: torch.Tensor, dim: int) -> torch.Tensor: ...

    @abstractmethod
    def reduce_scatter(self, tensor: torch.Tensor, dim: int) -> torch.Tensor: ...

    @abstractmethod
    def broadcast(self, tensor: torch.Tensor, src: int) -> torch.Tensor: ...

    @abstractmethod
    def send(self, tensor: torch.Tensor, dst: int) -> None: ...

    @abstractmethod
    def recv(self, tensor: torch.Tensor, src: int) -> torch.Tensor: ...

    @abstractmethod
    def barrier(self) -> None: ...

    @abstractmethod
    def destroy(self) -> None: ...

    @optional
    def all_to_all(self, tensor: torch.Tensor) -> torch.Tensor:
        """Optional. Equal splits along dimension 0."""
        raise NotImplementedError("this communicator has no all_to_all")
