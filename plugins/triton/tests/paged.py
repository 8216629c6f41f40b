"""A paged cache in the kernels' layout, beside the logical copy of what was written, for tests of attention kernels.

Shape suffixes: T tokens, H query heads, K key-value heads, D head size.
"""

from __future__ import annotations

from typing import Any

import torch
from enginecore.device import AttentionMetadata, AttentionParams, KVCacheSpec
from enginecore.testing.references import AttentionRule, LogicalCache, paged_attention
from enginecore_triton import DeviceDescription
from enginecore_triton.attention_backend import TritonAttention


class Batch:
    """Sequences of (tokens in this step, tokens in all) on shuffled blocks of a cache that is otherwise NaN."""

    def __init__(
        self, pairs: list[tuple[int, int]], *, dtype: str = "float32", kv: str = "", heads: int = 4, kv_heads: int = 2,
        size: int = 64, block_size: int = 16, scales: tuple[torch.Tensor, torch.Tensor] | tuple[()] = (),
        multiprocessors: int = 64, **features: Any,
    ) -> None:  # fmt: skip
        self.pairs, self.dtype = pairs, getattr(torch, dtype)
        self.rng = torch.Generator().manual_seed(len(pairs) * 1000 + size)
        given = dict(zip(("key_scales", "value_scales"), scales, strict=False))
        self.attention = TritonAttention(DeviceDescription(multiprocessors=multiprocessors), **given)
        spec = KVCacheSpec(
            num_layers=1, num_kv_heads=kv_heads, head_size=size, dtype=kv or dtype, block_size=block_size
        )  # fmt: skip
        layout = self.attention.kv_cache_layout(spec)
        counts = [-(-length // block_size) for _, length in pairs]
        total = sum(counts) + 3
        self.cache = torch.empty(layout.shape_for(total), dtype=getattr(torch, layout.dtype))
        self.cache.view(torch.uint8).fill_(0xFF)  # NaN in every floating dtype
        self.logical = LogicalCache(total, block_size, kv_heads, size)
        order = torch.randperm(total, generator=self.rng).tolist()
        self.tables = [[order.pop() for _ in range(count)] for count in counts]
        self.params = AttentionParams(
            scale=size**-0.5, num_heads=heads, num_kv_heads=kv_heads, head_size=size, **features
        )  # fmt: skip
        for (_, length), table in zip(pairs, self.tables, strict=True):
            key, value = self.normal(length, kv_heads, size), self.normal(length, kv_heads, size)
            slots = torch.tensor([table[i // block_size] * block_size + i % block_size for i in range(length)])
            self.store(key, value, slots, *scales)
        starts = [0]
        for queries, _ in pairs:
            starts.append(starts[-1] + queries)
        width, wild = max(counts) + 2, 0x3FFFFFFF  # what a wild entry points to would fault
        self.metadata = AttentionMetadata(
            query_start_loc=torch.tensor(starts, dtype=torch.int32),
            seq_lens=torch.tensor([length for _, length in pairs], dtype=torch.int32),
            block_table=torch.tensor([t + [wild] * (width - len(t)) for t in self.tables], dtype=torch.int32),
            slot_mapping=torch.full((starts[-1],), -1, dtype=torch.int64),
            max_query_len=max(queries for queries, _ in pairs), max_seq_len=max(length for _, length in pairs),
        )  # fmt: skip
        # A slice of a fused projection, as models have it: strided over tokens.
        self.query = self.normal(starts[-1], heads + 3, size)[:, :heads]

    def normal(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=self.rng).to(self.dtype)

    def store(self, key: torch.Tensor, value: torch.Tensor, slots: torch.Tensor, *scales: torch.Tensor) -> None:
        """Put keys and values where the kernels expect them, without the kernel that does it."""
        self.logical.write(key, value, slots)
        for side, x_TKD in enumerate((key, value)):
            write(self.cache[:, side], x_TKD, slots, self.params.head_size, scales[side] if scales else None)

    def run(self) -> torch.Tensor:
        return self.attention.forward(self.query, self.cache, self.metadata, self.params)

    def expected(self) -> torch.Tensor:
        p = self.params
        rule = AttentionRule(
            scale=p.scale, causal=p.causal, sliding_window=p.sliding_window, soft_cap=p.soft_cap, sinks_H=p.sinks,
            alibi_slopes_H=p.alibi_slopes,
        )  # fmt: skip
        queries, lengths = (list(side) for side in zip(*self.pairs, strict=True))
        return paged_attention(self.query, self.logical, queries, lengths, self.tables, rule)


def write(
    side: torch.Tensor, x_TKD: torch.Tensor, slots: torch.Tensor, size: int, scale: torch.Tensor | None = None
) -> None:  # fmt: skip
    """Into one side of a cache in the kernels' layout; `scale` is an fp8 cache's, one a head or one in all."""
    if side.dtype == torch.int8:
        block_size = side.shape[2] // (size + 4)
        blocks, places = slots // block_size, slots % block_size
        codes, scales = side.split([block_size * size, block_size * 4], dim=2)
        step = x_TKD.float().abs().amax(-1).clamp_min(1e-30) / 127
        rounded = (x_TKD.float() / step.unsqueeze(-1)).round().to(torch.int8)
        codes.unflatten(2, (block_size, size))[blocks, :, places] = rounded
        four = step.contiguous().view(torch.int8).reshape(*step.shape, 4)
        scales.unflatten(2, (block_size, 4))[blocks, :, places] = four
        return
    block_size = side.shape[2]
    if scale is not None:
        x_TKD = x_TKD / scale.reshape(1, -1, 1)
    # Indexed as bytes: not every dtype can be.
    stored = x_TKD.to(side.dtype).contiguous().view(torch.uint8)
    side.view(torch.uint8)[slots // block_size, :, slots % block_size] = stored
