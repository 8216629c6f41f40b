"""The memory part of the contract: what there is, what this process uses, and the KV cache's tensors."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from enginecore.device.contract import Contract, optional
from enginecore.errors import OutOfDeviceMemory

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, kw_only=True)
class MemoryInfo:
    """Bytes on the device as this process may see them. `usable_bytes` already honours a cgroup or partition limit;
    `source` says where the limit comes from ("cgroup v2", "physical memory", ...)."""

    total_bytes: int
    usable_bytes: int
    free_bytes: int
    source: str


@dataclass(frozen=True, kw_only=True)
class KVCacheSpec:
    """One group of attention calls that share a page shape. `kind` is "full" here; other kinds add fields.

    A block holds `block_size` tokens of keys and values for `num_layers` attention calls.
    """

    num_layers: int
    num_kv_heads: int
    head_size: int
    dtype: str
    block_size: int
    kind: str = "full"


@dataclass(frozen=True, kw_only=True)
class KVCacheLayout:
    """How a backend wants the cache of one attention call: `shape` has -1 where the block count goes; `page_bytes` is
    one block of one call."""

    shape: tuple[int, ...]
    dtype: str
    page_bytes: int

    def shape_for(self, num_blocks: int) -> tuple[int, ...]:
        return tuple(num_blocks if n == -1 else n for n in self.shape)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether Python or one of torch's allocators, the host's one included, has found memory exhausted."""
    if isinstance(error, (OutOfDeviceMemory, MemoryError)):
        return True
    return isinstance(error, RuntimeError) and "tried to allocate" in str(error).lower()


class MemoryManager(Contract):
    """The plugin's own allocator and its books."""

    @abstractmethod
    def memory_info(self) -> MemoryInfo: ...

    @abstractmethod
    def process_used_bytes(self) -> int:
        """Bytes of the device that this process holds now."""

    @abstractmethod
    def peak_bytes(self) -> int:
        """The largest `process_used_bytes` since `reset_peak`."""

    @abstractmethod
    def reset_peak(self) -> None: ...

    @abstractmethod
    def empty_cache(self) -> None:
        """Give memory that is cached but unused back to the system."""

    @abstractmethod
    def allocate_kv(self, layout: KVCacheLayout, num_blocks: int, num_layers: int) -> list[torch.Tensor]:
        """One tensor of `layout.shape_for(num_blocks)` for each attention call."""

    @abstractmethod
    def release_kv(self, caches: list[torch.Tensor]) -> None: ...

    @optional
    def shrink_kv(self, caches: list[torch.Tensor], num_blocks: int) -> list[torch.Tensor]:
        """Optional. Keep the first `num_blocks` blocks and give the rest back."""
        return [cache[:num_blocks].clone() for cache in caches]

    @optional
    def host_alloc_pinned(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Optional. Host memory that the device can copy from without staging."""
        import torch

        return torch.empty(shape, dtype=dtype)

    @optional
    def out_of_memory(self, error: BaseException) -> bool:
        """Optional. Whether `error`, which a step or an allocation raised, says that the device's memory is exhausted.
        Such a step costs its own requests; any other error ends the engine."""
        return is_out_of_memory(error)

    @optional
    def sleep(self, state: dict[str, Any]) -> None:
        """Optional. Free device memory while idle: `state["kv_caches"]` (tensors) lose their content,
        `state["weights"]` (tensors) keep it in host memory. The tensors stay the same objects; what a graph has
        recorded of their addresses does not hold afterwards. `state` keeps what `wake` needs."""

    @optional
    def wake(self, state: dict[str, Any]) -> None:
        """Optional. Undo `sleep`. Raises OutOfDeviceMemory, and can be tried again, when the memory is not there."""
