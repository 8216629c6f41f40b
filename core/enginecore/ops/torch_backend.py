"""A whole backend in plain torch, for plugins to start from: right on any device that torch runs on, and slow.

    class AcmeAttention(TorchAttention): ...     override one method at a time; the rest stays right
    class AcmeBackend(TorchBackend): ...

Public names of this module change by addition only, as those of `enginecore.device` do. Shapes: T tokens, Q tokens of
one sequence, H query heads, K key-value heads, D head size, L cached positions. The cache of one attention call is
[blocks, 2 (keys, values), block_size, K, D].
"""

from __future__ import annotations

import contextlib
import os
import resource
import sys
from typing import Any

import torch

from enginecore.device.attention import AttentionBackend, AttentionMetadata, AttentionParams
from enginecore.device.backend import Backend
from enginecore.device.capabilities import AttentionQuery, Capabilities, Verdict, check_attention
from enginecore.device.limits import memory_limit
from enginecore.device.manifest import BackendContext
from enginecore.device.memory import KVCacheLayout, KVCacheSpec, MemoryInfo, MemoryManager
from enginecore.device.optable import Impl, OpTable
from enginecore.errors import DriverMissingError

__all__ = [
    "TORCH_CAPABILITIES",
    "DoneEvent",
    "HostMemory",
    "ReferenceOps",
    "TorchAttention",
    "TorchBackend",
    "attend",
]

#: What `TorchAttention` computes rightly. A plugin claims all of it, or less.
TORCH_CAPABILITIES = Capabilities(
    dtypes=frozenset({"float32", "bfloat16", "float16"}),
    kv_dtypes=frozenset({"float32", "bfloat16", "float16"}),
    block_sizes=frozenset({8, 16, 32, 64, 128}),
    head_size_range=(1, 1024, 1),
    max_gqa_ratio=1024,
    features=frozenset({"sliding_window", "soft_cap", "sinks", "alibi", "non_causal"}),
)


class TorchAttention(AttentionBackend):
    """Paged attention one sequence at a time, in float32, on the device of its inputs."""

    def __init__(self, capabilities: Capabilities = TORCH_CAPABILITIES) -> None:
        self.capabilities = capabilities

    def supports(self, query: AttentionQuery) -> Verdict:
        return Verdict.of(check_attention(self.capabilities, query))

    def kv_cache_layout(self, spec: KVCacheSpec) -> KVCacheLayout:
        shape = (-1, 2, spec.block_size, spec.num_kv_heads, spec.head_size)
        page = 2 * spec.block_size * spec.num_kv_heads * spec.head_size * getattr(torch, spec.dtype).itemsize
        return KVCacheLayout(shape=shape, dtype=spec.dtype, page_bytes=page)

    def build_metadata(self, common: AttentionMetadata) -> AttentionMetadata:
        return common

    def reshape_and_cache(
        self, key_TKD: torch.Tensor, value_TKD: torch.Tensor, kv_cache: torch.Tensor, slot_mapping_T: torch.Tensor
    ) -> None:
        block_size = kv_cache.shape[2]
        keep = slot_mapping_T >= 0
        slots = slot_mapping_T[keep]
        blocks, offsets = slots // block_size, slots % block_size
        kv_cache[blocks, 0, offsets] = key_TKD[: len(keep)][keep].to(kv_cache.dtype)
        kv_cache[blocks, 1, offsets] = value_TKD[: len(keep)][keep].to(kv_cache.dtype)

    def forward(
        self,
        query_THD: torch.Tensor,
        kv_cache: torch.Tensor,
        metadata: AttentionMetadata,
        params: AttentionParams,
        out_THD: torch.Tensor | None = None,
    ) -> torch.Tensor:
        out = torch.zeros_like(query_THD) if out_THD is None else out_THD
        starts, block_size = metadata.query_start_loc.tolist(), kv_cache.shape[2]
        for i, length in enumerate(metadata.seq_lens.tolist()):
            begin, end = starts[i], starts[i + 1]
            if end == begin:
                continue
            pages = kv_cache[metadata.block_table[i, : -(-length // block_size)].long()]
            key_LKD, value_LKD = (pages[:, side].flatten(0, 1)[:length].float() for side in (0, 1))
            out[begin:end] = attend(query_THD[begin:end].float(), key_LKD, value_LKD, params).to(out.dtype)
        return out

    def copy_blocks(self, caches: list[torch.Tensor], pairs: list[tuple[int, int]]) -> None:
        if pairs:
            source, target = (list(side) for side in zip(*pairs, strict=True))
            for cache in caches:
                cache[target] = cache[source]

    def swap_blocks(self, src: list[torch.Tensor], dst: list[torch.Tensor], pairs: list[tuple[int, int]]) -> None:
        if pairs:
            source, target = (list(side) for side in zip(*pairs, strict=True))
            for from_cache, to_cache in zip(src, dst, strict=True):
                to_cache[target] = from_cache[source].to(device=to_cache.device, dtype=to_cache.dtype)


def attend(
    query_QHD: torch.Tensor, key_LKD: torch.Tensor, value_LKD: torch.Tensor, params: AttentionParams
) -> torch.Tensor:
    """Dense attention of the last Q of L positions, float32 in and out: [Q, H, D]."""
    queries, length, device = query_QHD.shape[0], key_LKD.shape[0], query_QHD.device
    ratio = params.num_heads // params.num_kv_heads
    key_LHD, value_LHD = key_LKD.repeat_interleave(ratio, 1), value_LKD.repeat_interleave(ratio, 1)
    scores_HQL = torch.einsum("qhd,lhd->hql", query_QHD, key_LHD) * params.scale
    if params.soft_cap:
        scores_HQL = params.soft_cap * torch.tanh(scores_HQL / params.soft_cap)
    position_Q1 = torch.arange(length - queries, length, device=device)[:, None]
    position_L = torch.arange(length, device=device)
    if params.alibi_slopes is not None:
        slopes_H = torch.as_tensor(params.alibi_slopes, dtype=torch.float32, device=device)
        scores_HQL = scores_HQL + slopes_H[:, None, None] * (position_L - position_Q1).float()
    hidden_QL = torch.zeros(queries, length, dtype=torch.bool, device=device)
    if params.causal:
        hidden_QL |= position_L > position_Q1
    if params.sliding_window:
        hidden_QL |= position_L <= position_Q1 - params.sliding_window
    scores_HQL = scores_HQL.masked_fill(hidden_QL, float("-inf"))
    if params.sinks is not None:
        sinks_H = torch.as_tensor(params.sinks, dtype=torch.float32, device=device)
        sinks_HQ1 = sinks_H[:, None, None].expand(-1, queries, 1)
        weights_HQL = torch.softmax(torch.cat([scores_HQL, sinks_HQ1], -1), -1)[..., :-1]
    else:
        weights_HQL = torch.softmax(scores_HQL, -1)
    return torch.einsum("hql,lhd->qhd", weights_HQL, value_LHD)


class HostMemory(MemoryManager):
    """The host's memory, with the limit that a container puts on it. A device of its own overrides all of this.

    The peak is kept for the life of the process, so `per_process_accounting` must not be claimed with it.
    """

    def memory_info(self) -> MemoryInfo:
        page = os.sysconf("SC_PAGE_SIZE")
        total, free = page * os.sysconf("SC_PHYS_PAGES"), page * os.sysconf("SC_AVPHYS_PAGES")
        limit = memory_limit()
        usable = min(total, int(limit.value)) if limit else total
        source = limit.source if limit and usable < total else "physical memory"
        return MemoryInfo(total_bytes=total, usable_bytes=usable, free_bytes=min(free, usable), source=source)

    def process_used_bytes(self) -> int:
        with open("/proc/self/statm") as statm:
            return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    def peak_bytes(self) -> int:
        unit = 1 if sys.platform == "darwin" else 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit

    def reset_peak(self) -> None:
        return None

    def empty_cache(self) -> None:
        return None

    def allocate_kv(self, layout: KVCacheLayout, num_blocks: int, num_layers: int) -> list[torch.Tensor]:
        dtype = getattr(torch, layout.dtype)
        return [torch.empty(layout.shape_for(num_blocks), dtype=dtype) for _ in range(num_layers)]

    def release_kv(self, caches: list[torch.Tensor]) -> None:
        caches.clear()


class DoneEvent:
    """For devices whose work is done when the call returns."""

    def record(self) -> None:
        return None

    def synchronize(self) -> None:
        return None

    def query(self) -> bool:
        return True


class ReferenceOps(OpTable):
    """An empty table: every op runs as the torch reference on the backend's device.

    A subclass puts its own into `table`, by the names of `enginecore.ops.schema`.
    """

    table: dict[str, Impl] = {}

    def get(self, op: str) -> Impl | None:
        return self.table.get(op)


class TorchBackend(Backend):
    """One device that torch runs on the host, all parts in place. Set other parts after `super().__init__(ctx)`."""

    def __init__(self, ctx: BackendContext) -> None:
        self.name = ctx.device
        if ctx.num_threads:
            torch.set_num_threads(ctx.num_threads)
        self.set_device(ctx.index)
        self.capabilities: Capabilities = TORCH_CAPABILITIES
        self.memory: MemoryManager = HostMemory()
        self.attention: AttentionBackend | None = TorchAttention(self.capabilities)
        self.ops: OpTable | None = ReferenceOps()

    def device_count(self) -> int:
        return 1

    def torch_device(self) -> torch.device:
        return torch.device("cpu")

    def set_device(self, index: int) -> None:
        if not 0 <= index < self.device_count():
            raise DriverMissingError(f"{self.name}:{index} does not exist: {self.device_count()} found")

    def synchronize(self) -> None:
        return None

    def stream(self) -> Any:
        return contextlib.nullcontext()

    def event(self) -> Any:
        return DoneEvent()

    def manual_seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    def shutdown(self) -> None:
        return None
