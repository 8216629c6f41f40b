"""One attention call, checked and taken apart once, for all attention kernels."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from enginecore.device.attention import AttentionMetadata, AttentionParams

from enginecore_triton.launch import power_of_two

#: dtype of the cache -> the name under which kernels unpack it.
_BYTES = {torch.float8_e4m3fn: "float8_e4m3fn", torch.float8_e5m2: "float8_e5m2"}


@dataclass(frozen=True)
class AttentionCall:
    """`cache` is [blocks, 2, K, block_size, D], fp8 seen as bytes; for int8 see `ops/_tile.py`."""

    query: torch.Tensor
    cache: torch.Tensor
    block_table: torch.Tensor
    seq_lens: torch.Tensor
    query_start_loc: torch.Tensor
    max_seq_len: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    block_size: int
    format: str
    scale: float
    causal: bool
    soft_cap: float | None
    window: int | None
    sinks: torch.Tensor | None
    slopes: torch.Tensor | None
    key_scale: torch.Tensor | None
    value_scale: torch.Tensor | None

    @property
    def num_seqs(self) -> int:
        return int(self.seq_lens.shape[0])

    @property
    def block_d(self) -> int:
        return power_of_two(self.head_size, 16)

    @property
    def sizes(self) -> dict[str, int]:
        """What rows of tuning configs are bounded by; item sizes in bytes."""
        return {
            "head_size": self.block_d, "itemsize": self.query.element_size(), "kv_itemsize": self.cache.element_size()
        }  # fmt: skip

    @property
    def strides(self) -> tuple[int, ...]:
        """Token and head of the query; block, side and head of the cache; row of the block table."""
        return (*self.query.stride()[:2], *self.cache.stride()[:3], self.block_table.stride(0))


def cache_format(cache: torch.Tensor) -> tuple[torch.Tensor, str]:
    """(the cache as kernels take it, the name of its format)."""
    if cache.dtype in _BYTES:
        return cache.view(torch.uint8), _BYTES[cache.dtype]
    return cache, "int8" if cache.dtype == torch.int8 else "float"


def block_size_of(cache: torch.Tensor, head_size: int) -> int:
    return int(cache.shape[3]) // (head_size + 4) if cache.dtype == torch.int8 else int(cache.shape[3])


def make_call(
    query_THD: torch.Tensor, kv_cache: torch.Tensor, metadata: AttentionMetadata, params: AttentionParams,
    key_scale_K: torch.Tensor | None = None, value_scale_K: torch.Tensor | None = None,
) -> AttentionCall:  # fmt: skip
    """`key_scale_K`, `value_scale_K` (float32, one a head) are for fp8 caches and must be given with one."""
    cache, name = cache_format(kv_cache)
    return AttentionCall(
        query=query_THD if query_THD.stride(-1) == 1 else query_THD.contiguous(),
        cache=cache, block_table=metadata.block_table, seq_lens=metadata.seq_lens,
        query_start_loc=metadata.query_start_loc, max_seq_len=metadata.max_seq_len, num_heads=params.num_heads,
        num_kv_heads=params.num_kv_heads, head_size=params.head_size,
        block_size=block_size_of(kv_cache, params.head_size), format=name, scale=params.scale, causal=params.causal,
        soft_cap=params.soft_cap or None, window=params.sliding_window or None,
        sinks=_per_head(params.sinks, query_THD), slopes=_per_head(params.alibi_slopes, query_THD),
        key_scale=key_scale_K, value_scale=value_scale_K,
    )  # fmt: skip


def _per_head(values: Any, like: torch.Tensor) -> torch.Tensor | None:
    if values is None:
        return None
    return torch.as_tensor(values, device=like.device).contiguous()
