"""The toy backend's collectives: right, until they are asked for a planted fault."""

from __future__ import annotations

import ctypes
import time

import torch
from enginecore.device import Communicator, GroupSpec
from enginecore.device.distributed import TorchCommunicator


class OneRank(Communicator):
    def __init__(self, fault: str) -> None:
        self.fault = fault

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor * 2 if self.fault == "all_reduce_doubles" else tensor

    def all_gather(self, tensor: torch.Tensor, dim: int) -> torch.Tensor:
        return tensor

    def reduce_scatter(self, tensor: torch.Tensor, dim: int) -> torch.Tensor:
        return tensor

    def broadcast(self, tensor: torch.Tensor, src: int) -> torch.Tensor:
        return tensor

    def send(self, tensor: torch.Tensor, dst: int) -> None:
        raise ValueError("there is one rank only")

    def recv(self, tensor: torch.Tensor, src: int) -> torch.Tensor:
        raise ValueError("there is one rank only")

    def barrier(self) -> None:
        return None

    def destroy(self) -> None:
        return None


class ToyGroup(TorchCommunicator):
    """Two ranks over gloo. "collectives_wrong": each call is wrong in a way of its own."""

    def __init__(self, group: GroupSpec, fault: str) -> None:
        super().__init__(group, "gloo")
        self.fault, self.wrong = fault, fault == "collectives_wrong"

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        last = tensor.flatten()[-1].clone()
        out = super().all_reduce(tensor)
        if self.wrong and out.numel() % 2:  # what is left over when the ranks have cut it up
            out.view(-1)[-1] = last
        return out

    def all_gather(self, tensor: torch.Tensor, dim: int) -> torch.Tensor:
        if self.fault == "rank_segfaults" and self.group.rank == 1:
            ctypes.string_at(8)
        if self.fault == "rank_hangs" and self.group.rank == 1:
            time.sleep(3600)
        out = super().all_gather(tensor, dim)
        return torch.cat(out.chunk(2, dim)[::-1], dim) if self.wrong else out

    def reduce_scatter(self, tensor: torch.Tensor, dim: int) -> torch.Tensor:
        if self.wrong:
            part = tensor.shape[dim] // 2
            return self.all_reduce(tensor).narrow(dim, 0, part)
        return super().reduce_scatter(tensor, dim)

    def broadcast(self, tensor: torch.Tensor, src: int) -> torch.Tensor:
        return super().broadcast(tensor, 0 if self.wrong else src)

    def recv(self, tensor: torch.Tensor, src: int) -> torch.Tensor:
        out = super().recv(tensor, src)
        return out.float() if self.wrong else out

    def barrier(self) -> None:
        if not self.wrong:
            super().barrier()

    def all_to_all(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor if self.wrong else super().all_to_all(tensor)
