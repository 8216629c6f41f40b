"""Paged batches of random numbers for the benches."""

from __future__ import annotations

import torch
from enginecore.device import AttentionMetadata, AttentionParams, KVCacheSpec
from enginecore_triton.attention_backend import TritonAttention


def metadata(pairs: list[tuple[int, int]], block_size: int, where: torch.device) -> tuple[AttentionMetadata, int]:
    """For (tokens in this step, tokens in all) of each sequence, blocks in random order; and how many blocks."""
    counts = [-(-length // block_size) for _, length in pairs]
    order, table = torch.randperm(sum(counts)).int(), torch.zeros(len(pairs), max(counts), dtype=torch.int32)
    used, starts = 0, [0]
    for row, ((queries, _), count) in enumerate(zip(pairs, counts, strict=True)):
        table[row, :count] = order[used : used + count]
        used += count
        starts.append(starts[-1] + queries)
    found = AttentionMetadata(
        query_start_loc=torch.tensor(starts, dtype=torch.int32, device=where),
        seq_lens=torch.tensor([length for _, length in pairs], dtype=torch.int32, device=where),
        block_table=table.to(where),
        slot_mapping=torch.full((starts[-1],), -1, dtype=torch.int64, device=where),
        max_query_len=max(queries for queries, _ in pairs),
        max_seq_len=max(length for _, length in pairs),
    )
    return found, used


class Bench:
    """Inputs of one attention call, `copies` times over."""

    def __init__(
        self, attention: TritonAttention, pairs: list[tuple[int, int]], where: torch.device, *, dtype: str, kv: str,
        heads: int, kv_heads: int, size: int, block_size: int, copies: int,
    ) -> None:  # fmt: skip
        self.attention, self.pairs = attention, pairs
        self.metadata, blocks = metadata(pairs, block_size, where)
        spec = KVCacheSpec(num_layers=1, num_kv_heads=kv_heads, head_size=size, dtype=kv, block_size=block_size)
        layout = attention.kv_cache_layout(spec)
        self.params = AttentionParams(scale=size**-0.5, num_heads=heads, num_kv_heads=kv_heads, head_size=size)
        kind, number = getattr(torch, dtype), getattr(torch, layout.dtype)
        self.caches = [_random(layout.shape_for(blocks), number, where) for _ in range(copies)]
        tokens = sum(queries for queries, _ in pairs)
        self.query = torch.randn(tokens, heads, size, device=where).to(kind)
        self.out = torch.empty_like(self.query)

    def runs(self) -> list:
        return [
            lambda cache=cache: self.attention.forward(self.query, cache, self.metadata, self.params, self.out)
            for cache in self.caches
        ]

    @property
    def read_bytes(self) -> int:
        p = self.params
        width = self.caches[0].element_size() * p.head_size + (4 if self.caches[0].dtype == torch.int8 else 0)
        return sum(length for _, length in self.pairs) * 2 * p.num_kv_heads * width

    @property
    def operations(self) -> int:
        """Of the two products, over what causality leaves."""
        pairs = sum(q * (length - q) + q * (q + 1) // 2 for q, length in self.pairs)
        return 4 * pairs * self.params.num_heads * self.params.head_size


def _random(shape: tuple[int, ...], dtype: torch.dtype, where: torch.device) -> torch.Tensor:
    if dtype.itemsize == 1:
        # Bit patterns of small numbers in every one-byte format.
        return torch.randint(0, 56, shape, dtype=torch.uint8, device=where).view(dtype)
    return torch.randn(shape, device=where).to(dtype)
