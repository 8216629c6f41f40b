"""A backend in plain torch: slow, short and obviously right. Tests of the core run on it when no plugin is meant.

Cache of one attention call: [blocks, 2 (key, value), block size, K, D].
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from enginecore.device import (
    AttentionBackend,
    AttentionMetadata,
    AttentionParams,
    AttentionQuery,
    Backend,
    Capabilities,
    Impl,
    KVCacheLayout,
    KVCacheSpec,
    MemoryInfo,
    MemoryManager,
    OpTable,
    Verdict,
    check_attention,
)

CAPABILITIES = Capabilities(
    dtypes=frozenset({"float32", "bfloat16", "float16"}),
    kv_dtypes=frozenset({"float32", "bfloat16", "float16"}),
    block_sizes=frozenset({4, 8, 16, 32, 64, 128}),
    head_size_range=(1, 1024, 1),
    max_gqa_ratio=128,
    features=frozenset({"sliding_window", "soft_cap", "sinks"}),
)


class TorchAttention(AttentionBackend):
    def supports(self, query: AttentionQuery) -> Verdict:
        return Verdict.of(check_attention(CAPABILITIES, query))

    def kv_cache_layout(self, spec: KVCacheSpec) -> KVCacheLayout:
        itemsize = getattr(torch, spec.dtype).itemsize
        return KVCacheLayout(
            shape=(-1, 2, spec.block_size, spec.num_kv_heads, spec.head_size),
            dtype=spec.dtype,
            page_bytes=2 * spec.block_size * spec.num_kv_heads * spec.head_size * itemsize,
        )

    def build_metadata(self, common: AttentionMetadata) -> AttentionMetadata:
        return common

    def reshape_and_cache(
        self, key_TKD: torch.Tensor, value_TKD: torch.Tensor, kv_cache: torch.Tensor, slot_mapping_T: torch.Tensor
    ) -> None:
        keep = slot_mapping_T >= 0
        slots, size = slot_mapping_T[keep], kv_cache.shape[2]
        kv_cache[slots // size, 0, slots % size] = key_TKD[keep].to(kv_cache.dtype)
        kv_cache[slots // size, 1, slots % size] = value_TKD[keep].to(kv_cache.dtype)

    def forward(
        self,
        query_THD: torch.Tensor,
        kv_cache: torch.Tensor,
        metadata: AttentionMetadata,
        params: AttentionParams,
        out_THD: torch.Tensor | None = None,
    ) -> torch.Tensor:
        out = torch.zeros_like(query_THD) if out_THD is None else out_THD
        starts = metadata.query_start_loc.tolist()
        for i, length in enumerate(metadata.seq_lens.tolist()):
            start, end = starts[i], starts[i + 1]
            if end == start:
                continue
            blocks = metadata.block_table[i, : -(-length // kv_cache.shape[2])].long()
            key = kv_cache[blocks, 0].flatten(0, 1)[:length].float()
            value = kv_cache[blocks, 1].flatten(0, 1)[:length].float()
            out[start:end] = _attend(query_THD[start:end].float(), key, value, length, params).to(out.dtype)
        return out

    def copy_blocks(self, caches: list[torch.Tensor], pairs: list[tuple[int, int]]) -> None:
        for cache in caches:
            for src, dst in pairs:
                cache[dst] = cache[src]

    def swap_blocks(self, src: list[torch.Tensor], dst: list[torch.Tensor], pairs: list[tuple[int, int]]) -> None:
        for a, b in zip(src, dst, strict=True):
            for i, j in pairs:
                b[j] = a[i]


def _attend(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, length: int, params: AttentionParams
) -> torch.Tensor:
    group = params.num_heads // params.num_kv_heads
    key, value = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
    scores = torch.einsum("qhd,khd->hqk", query, key) * params.scale
    if params.soft_cap is not None:
        scores = params.soft_cap * torch.tanh(scores / params.soft_cap)
    at = torch.arange(length - query.shape[0], length).unsqueeze(1)
    other = torch.arange(length)
    hidden = other > at
    if params.sliding_window is not None:
        hidden |= other <= at - params.sliding_window
    scores = scores.masked_fill(hidden, float("-inf"))
    if params.sinks is not None:
        assert params.sinks.dtype == torch.float32
        sinks = params.sinks.float().view(-1, 1, 1).expand(-1, query.shape[0], 1)
        return torch.einsum("hqk,khd->qhd", torch.cat([scores, sinks], -1).softmax(-1)[..., :-1], value)
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1), value)


class TorchMemory(MemoryManager):
    def memory_info(self) -> MemoryInfo:
        return MemoryInfo(total_bytes=1 << 33, usable_bytes=1 << 33, free_bytes=1 << 33, source="test")

    def process_used_bytes(self) -> int:
        return 0

    def peak_bytes(self) -> int:
        return 0

    def reset_peak(self) -> None: ...

    def empty_cache(self) -> None: ...

    def allocate_kv(self, layout: KVCacheLayout, num_blocks: int, num_layers: int) -> list[torch.Tensor]:
        shape, dtype = layout.shape_for(num_blocks), getattr(torch, layout.dtype)
        # Poison: a block that is read before it is written shows.
        return [torch.full(shape, float("nan"), dtype=dtype) for _ in range(num_layers)]

    def release_kv(self, caches: list[torch.Tensor]) -> None:
        caches.clear()


class NoOps(OpTable):
    def get(self, op: str) -> Impl | None:
        return None


class TorchBackend(Backend):
    def __init__(self, ops: OpTable | None = None) -> None:
        self.capabilities = CAPABILITIES
        self.memory = TorchMemory()
        self.attention = TorchAttention()
        self.ops = ops or NoOps()

    def torch_device(self) -> torch.device:
        return torch.device("cpu")

    def set_device(self, index: int) -> None: ...

    def synchronize(self) -> None: ...

    def stream(self) -> Any:
        return contextlib.nullcontext()

    def event(self) -> Any:
        raise NotImplementedError

    def manual_seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    def shutdown(self) -> None: ...


class Paged:
    """Feeds token lists to a loaded model through a paged cache with shuffled blocks, one call to `step` a step."""

    def __init__(self, model: Any, backend: Backend, num_blocks: int = 64, block_size: int = 4) -> None:
        self.model, self.backend, self.block_size = model, backend, block_size
        self.caches: list[torch.Tensor] = []
        specs = {(s.num_kv_heads, s.head_size): s for s in model.kv_specs(block_size)}
        for call in model.shape.calls:
            layout = backend.attention.kv_cache_layout(specs[call.num_kv_heads, call.head_size])
            self.caches += backend.memory.allocate_kv(layout, num_blocks, 1)
        generator = torch.Generator().manual_seed(0)
        self._free = torch.randperm(num_blocks, generator=generator).tolist()
        self._blocks: dict[str, list[int]] = {}
        self._lengths: dict[str, int] = {}

    def step(self, batch: dict[str, list[int]]) -> torch.Tensor:
        """New tokens of each sequence; returns logits [T, V] of all of them, in order."""
        ids, positions, slots, starts, lengths = [], [], [], [0], []
        for name, tokens in batch.items():
            blocks, begin = self._blocks.setdefault(name, []), self._lengths.get(name, 0)
            end = begin + len(tokens)
            while len(blocks) * self.block_size < end:
                blocks.append(self._free.pop())
            ids += tokens
            positions += range(begin, end)
            slots += [blocks[p // self.block_size] * self.block_size + p % self.block_size for p in range(begin, end)]
            starts.append(len(ids))
            lengths.append(end)
            self._lengths[name] = end
        width = max(len(self._blocks[name]) for name in batch)
        table = [self._blocks[name] + [0] * (width - len(self._blocks[name])) for name in batch]
        common = AttentionMetadata(
            query_start_loc=torch.tensor(starts, dtype=torch.int32),
            seq_lens=torch.tensor(lengths, dtype=torch.int32),
            block_table=torch.tensor(table, dtype=torch.int32),
            slot_mapping=torch.tensor(slots, dtype=torch.int64),
            max_query_len=max(len(tokens) for tokens in batch.values()),
            max_seq_len=max(lengths),
        )
        metadata = self.backend.attention.build_metadata(common)
        every = torch.arange(len(ids))
        return self.model.forward(torch.tensor(ids), torch.tensor(positions), metadata, self.caches, every)
