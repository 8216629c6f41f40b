"""The collective part of the contract (an optional slot of a backend): tensors that travel between ranks.

A rank is a process with one device. `Backend.communicator` joins a group of them; what it returns by default speaks
through torch.distributed, under the name that the backend gives.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING

from enginecore.device.contract import Contract, optional

if TYPE_CHECKING:
    import torch


class CollectiveError(RuntimeError):
    """A collective did not complete: a peer has ended, or did not join within the group's timeout. The group cannot be
    used afterwards."""


@dataclass(frozen=True, kw_only=True)
class GroupSpec:
    """A group to join, the same for all its ranks but for `rank`.

    `init_method` is where they find each other: "tcp://HOST:PORT", rank 0 listening, or "file:///PATH" on one machine,
    a file that does not exist yet. `timeout_s` bounds the joining and every call.
    """

    rank: int
    world_size: int
    init_method: str
    timeout_s: float = 300.0

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.world_size:
            raise ValueError(f"rank {self.rank} is not one of a group of {self.world_size}")
        if self.timeout_s <= 0:
            raise ValueError(f"timeout_s must be positive, got {self.timeout_s}")


class Communicator(Contract):
    """Collectives over the ranks of one group, called by all of them in the same order. Every call takes and returns
    tensors on the device and may overwrite its input; results have the dtype of the input, sums included.

    A call that a peer does not join within the group's timeout raises CollectiveError, or ends the process where the
    device's library knows no other way; it never waits for ever.
    """

    @abstractmethod
    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """The sum over all ranks."""

    @abstractmethod
    def all_gather(self, tensor: torch.Tensor, dim: int) -> torch.Tensor:
        """All ranks' tensors, which have one shape, joined along `dim` in the order of the ranks."""

    @abstractmethod
    def reduce_scatter(self, tensor: torch.Tensor, dim: int) -> torch.Tensor:
        """This rank's part of the sum: `dim` cut into as many equal parts as there are ranks. ValueError when it cannot
        be."""

    @abstractmethod
    def broadcast(self, tensor: torch.Tensor, src: int) -> torch.Tensor:
        """Rank `src`'s tensor; the others give one of the same shape and dtype."""

    @abstractmethod
    def send(self, tensor: torch.Tensor, dst: int) -> None:
        """To rank `dst`, which calls `recv`."""

    @abstractmethod
    def recv(self, tensor: torch.Tensor, src: int) -> torch.Tensor:
        """What rank `src` sends, of the shape and dtype of `tensor`."""

    @abstractmethod
    def barrier(self) -> None:
        """Returns when every rank has called it."""

    @abstractmethod
    def destroy(self) -> None:
        """Leave the group; nothing of it is used afterwards."""

    @optional
    def all_to_all(self, tensor: torch.Tensor) -> torch.Tensor:
        """Optional. Equal splits along dimension 0: part j goes to rank j, the result is what came, by rank. ValueError
        when it cannot be split."""
        raise NotImplementedError("this communicator has no all_to_all")
