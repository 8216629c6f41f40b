"""Paged attention through the native kernels. The layout of the cache is drawn in `src/kernels.hpp`.

Shapes: T tokens, H query heads, K key-value heads, D head size. A cache is [blocks, 2, K, block_size, D rounded up to
16]; the last two dimensions are stored as panels, so only the kernels read it. An int8 cache has its scales, one
float32 a token, behind each head's codes: [blocks, 2, K, block_size * (D rounded up to 16 + 4)].
"""

from __future__ import annotations

import math
from typing import Any

import torch
from enginecore.device.attention import AttentionBackend, AttentionMetadata, AttentionParams
from enginecore.device.capabilities import AttentionQuery, Capabilities, GraphSupport, Verdict, check_attention
from enginecore.device.memory import KVCacheLayout, KVCacheSpec

from enginecore_cpu.torch_path import BYTE_DTYPES, MAX_WORLD_SIZE

_ITEM_SIZE = {"float32": 4, "bfloat16": 2}
_SCALE_BYTES = 4


def native_capabilities(isa: str) -> Capabilities:
    dtypes = frozenset(_ITEM_SIZE)
    return Capabilities(
        dtypes=dtypes,
        kv_dtypes=dtypes | BYTE_DTYPES,
        quantizations=frozenset({"q4_0", "q4_1", "q5_0", "q5_1", "q8_0", "int8"}),
        block_sizes=frozenset({8, 16, 32, 64, 128}),
        head_size_range=(1, 1024, 1),
        max_gqa_ratio=1024,
        features=frozenset({"sliding_window", "soft_cap", "sinks", "alibi", "non_causal"}),
        graph_support=GraphSupport.UNIFORM_SINGLE_TOKEN_DECODE,
        unified_memory=True,
        per_process_accounting=True,
        batch_invariant=True,
        max_world_size=MAX_WORLD_SIZE,
        ranks_share_device=True,
        isa=(isa,),
    )


class NativeAttention(AttentionBackend):
    def __init__(self, kernels: Any, capabilities: Capabilities) -> None:
        self._capabilities = capabilities
        self._cache_write = kernels.cache_write
        self._attention = kernels.attention
        self._copy_blocks = kernels.copy_blocks

    def supports(self, query: AttentionQuery) -> Verdict:
        reasons = check_attention(self._capabilities, query)
        if query.kv_dtype not in (query.dtype, *BYTE_DTYPES):
            reasons.append(f"a {query.kv_dtype} cache under {query.dtype} activations is not supported")
        return Verdict.of(reasons)

    def kv_cache_layout(self, spec: KVCacheSpec) -> KVCacheLayout:
        if spec.dtype not in (*_ITEM_SIZE, *BYTE_DTYPES):
            raise ValueError(f"KV cache dtype {spec.dtype} is not one of {sorted((*_ITEM_SIZE, *BYTE_DTYPES))}")
        padded = -(-spec.head_size // 16) * 16
        shape: tuple[int, ...] = (-1, 2, spec.num_kv_heads, spec.block_size, padded)
        if spec.dtype == "int8":
            shape = (-1, 2, spec.num_kv_heads, spec.block_size * (padded + _SCALE_BYTES))
        page = _ITEM_SIZE.get(spec.dtype, 1) * math.prod(shape[1:])
        return KVCacheLayout(shape=shape, dtype=spec.dtype, page_bytes=page)

    def build_metadata(self, common: AttentionMetadata) -> AttentionMetadata:
        return common

    def reshape_and_cache(
        self, key_TKD: torch.Tensor, value_TKD: torch.Tensor, kv_cache: torch.Tensor, slot_mapping_T: torch.Tensor
    ) -> None:
        self._cache_write(key_TKD, value_TKD, kv_cache, slot_mapping_T)

    def forward(
        self,
        query_THD: torch.Tensor,
        kv_cache: torch.Tensor,
        metadata: AttentionMetadata,
        params: AttentionParams,
        out_THD: torch.Tensor | None = None,
    ) -> torch.Tensor:
        out = torch.empty(query_THD.shape, dtype=query_THD.dtype) if out_THD is None else out_THD
        self._attention(
            query_THD,
            kv_cache,
            metadata.query_start_loc,
            metadata.seq_lens,
            metadata.block_table,
            out,
            params.scale,
            params.soft_cap or 0.0,
            params.sliding_window or 0,
            params.sinks,
            params.alibi_slopes,
            params.causal,
        )
        return out

    def copy_blocks(self, caches: list[torch.Tensor], pairs: list[tuple[int, int]]) -> None:
        if pairs:
            self._copy_blocks(caches, caches, pairs)

    def swap_blocks(self, src: list[torch.Tensor], dst: list[torch.Tensor], pairs: list[tuple[int, int]]) -> None:
        if pairs:
            self._copy_blocks(src, dst, pairs)
