"""A communicator over torch.distributed, for any backend name it knows: "gloo", "nccl", "xccl", or one that a vendor's
package registers. `Backend.communicator` makes it; a plugin may subclass it and replace one call."""

from __future__ import annotations

import datetime
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from enginecore.device.collectives import CollectiveError, Communicator, GroupSpec

if TYPE_CHECKING:
    import torch


def _dist() -> Any:
    """torch.distributed, when it is needed: the contract is read without torch."""
    import torch.distributed

    return torch.distributed


class TorchCommunicator(Communicator):
    """The process's group of torch.distributed, on `device`.

    Raises CollectiveError when the others do not join in time, ValueError for a name that torch does not have,
    RuntimeError when this process is in a group already.
    """

    def __init__(self, group: GroupSpec, name: str, device: torch.device | None = None) -> None:
        if not _dist().is_available():
            raise RuntimeError("this build of torch has no torch.distributed")
        if _dist().is_initialized():
            raise RuntimeError("this process has joined a group already; destroy() leaves it")
        if not _dist().is_backend_available(name):
            raise ValueError(f"torch.distributed has no backend {name!r} here; it has {', '.join(_names())}")
        self.group, self.name = group, name
        timeout = datetime.timedelta(seconds=group.timeout_s)
        with _told("join the group", group):
            _dist().init_process_group(
                name,
                init_method=group.init_method,
                rank=group.rank,
                world_size=group.world_size,
                timeout=timeout,
                # One of several devices: libraries bind to it now instead of guessing at the first call.
                device_id=device if device is not None and device.index is not None else None,
            )

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        out = tensor.contiguous()
        with _told("all_reduce", self.group):
            _dist().all_reduce(out)
        return out

    def all_gather(self, tensor: torch.Tensor, dim: int) -> torch.Tensor:
        source, ranks = tensor.movedim(dim, 0).contiguous(), self.group.world_size
        out = source.new_empty((ranks * source.shape[0], *source.shape[1:]))
        with _told("all_gather", self.group):
            _gather(out, source)
        return out.movedim(0, dim)

    def reduce_scatter(self, tensor: torch.Tensor, dim: int) -> torch.Tensor:
        source, ranks = tensor.movedim(dim, 0).contiguous(), self.group.world_size
        out = source.new_empty((_part("reduce_scatter", source.shape[0], ranks), *source.shape[1:]))
        with _told("reduce_scatter", self.group):
            _scatter(out, source)
        return out.movedim(0, dim)

    def broadcast(self, tensor: torch.Tensor, src: int) -> torch.Tensor:
        out = tensor.contiguous()
        with _told("broadcast", self.group):
            _dist().broadcast(out, src)
        return out

    def send(self, tensor: torch.Tensor, dst: int) -> None:
        with _told("send", self.group):
            _dist().send(tensor.contiguous(), dst)

    def recv(self, tensor: torch.Tensor, src: int) -> torch.Tensor:
        out = tensor.contiguous()
        with _told("recv", self.group):
            _dist().recv(out, src)
        return out

    def barrier(self) -> None:
        with _told("barrier", self.group):
            _dist().barrier()

    def destroy(self) -> None:
        if _dist().is_initialized():
            _dist().destroy_process_group()

    def all_to_all(self, tensor: torch.Tensor) -> torch.Tensor:
        _part("all_to_all", tensor.shape[0], self.group.world_size)
        source = tensor.contiguous()
        out = source.new_empty(source.shape)
        with _told("all_to_all", self.group):
            _dist().all_to_all_single(out, source)
        return out


def _names() -> list[str]:
    return [name for name in _dist().Backend.backend_list if name != "undefined" and _dist().is_backend_available(name)]


def _part(call: str, size: int, ranks: int) -> int:
    if size % ranks:
        raise ValueError(f"{call}: {size} is not a multiple of the {ranks} ranks")
    return size // ranks


def _newest(*names: str) -> Callable[..., Any]:
    """torch has renamed some functions; the old names warn where there are new ones."""
    found: Callable[..., Any] = next(getattr(_dist(), name) for name in names if hasattr(_dist(), name))
    return found


def _gather(out: torch.Tensor, source: torch.Tensor) -> None:
    _newest("all_gather_single", "all_gather_into_tensor")(out, source)


def _scatter(out: torch.Tensor, source: torch.Tensor) -> None:
    _newest("reduce_scatter_single", "reduce_scatter_tensor")(out, source)


@contextmanager
def _told(call: str, group: GroupSpec) -> Iterator[None]:
    """torch's own errors, named. A ValueError or TypeError is the caller's and stays what it is."""
    try:
        yield
    except RuntimeError as error:
        where = f"rank {group.rank} of {group.world_size} could not {call} within {group.timeout_s:g} s"
        raise CollectiveError(f"{where}: {error}") from error
