"""The backend's required parts in plain torch, for installations without the compiled kernels.

Correct, not fast: the doctor says that these run. Shapes: T tokens, H query heads, K key-value heads, D head size.
The cache of one attention call is [blocks, 2 (keys, values), block_size, K, D].
"""

from __future__ import annotations

import torch
from enginecore.device.attention import AttentionBackend, AttentionMetadata, AttentionParams
from enginecore.device.capabilities import AttentionQuery, Capabilities, Verdict, check_attention
from enginecore.device.memory import KVCacheLayout, KVCacheSpec
from enginecore.device.optable import Impl, OpTable

_ITEM_SIZE = {"float32": 4, "bfloat16": 2, "float16": 2}


def torch_capabilities() -> Capabilities:
    dtypes = frozenset(_ITEM_SIZE)
    return Capabilities(
        dtypes=dtypes,
        kv_dtypes=dtypes,
        block_sizes=frozenset({8, 16, 32, 64, 128}),
        head_size_range=(1, 1024, 1),
        max_gqa_ratio=1024,
        features=frozenset({"sliding_window", "soft_cap", "sinks", "alibi", "non_causal"}),
        unified_memory=True,
        per_process_accounting=True,
    )


class TorchAttention(AttentionBackend):
    """Paged attention one sequence at a time, in float32."""

    def __init__(self, capabilities: Capabilities) -> None:
        self._capabilities = capabilities

    def supports(self, query: AttentionQuery) -> Verdict:
        return Verdict.of(check_attention(self._capabilities, query))

    def kv_cache_layout(self, spec: KVCacheSpec) -> KVCacheLayout:
        page = 2 * spec.block_size * spec.num_kv_heads * spec.head_size * _ITEM_SIZE[spec.dtype]
        shape = (-1, 2, spec.block_size, spec.num_kv_heads, spec.head_size)
        return KVCacheLayout(shape=shape, dtype=spec.dtype, page_bytes=page)

    def build_metadata(self, common: AttentionMetadata) -> AttentionMetadata:
        return common

    def reshape_and_cache(
        self, key_TKD: torch.Tensor, value_TKD: torch.Tensor, kv_cache: torch.Tensor, slot_mapping_T: torch.Tensor
    ) -> None:
        block_size = kv_cache.shape[2]
        keep = slot_mapping_T >= 0
        slots = slot_mapping_T[keep]
        if slots.numel() and int(slots.max()) >= kv_cache.shape[0] * block_size:
            raise ValueError(f"slot {int(slots.max())} is outside the cache of {kv_cache.shape[0] * block_size} slots")
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
        out = torch.zeros(query_THD.shape, dtype=query_THD.dtype) if out_THD is None else out_THD
        starts, lengths = metadata.query_start_loc.tolist(), metadata.seq_lens.tolist()
        block_size = kv_cache.shape[2]
        for i, length in enumerate(lengths):
            begin, end = starts[i], starts[i + 1]
            if end == begin:
                continue
            blocks = metadata.block_table[i, : -(-length // block_size)].long()
            pages = kv_cache[blocks]
            key_LKD = pages[:, 0].flatten(0, 1)[:length].float()
            value_LKD = pages[:, 1].flatten(0, 1)[:length].float()
            out[begin:end] = _attend(query_THD[begin:end].float(), key_LKD, value_LKD, params).to(out.dtype)
        return out

    def copy_blocks(self, caches: list[torch.Tensor], pairs: list[tuple[int, int]]) -> None:
        if pairs:
            source, target = (torch.tensor(side) for side in zip(*pairs, strict=True))
            for cache in caches:
                cache[target] = cache[source]

    def swap_blocks(self, src: list[torch.Tensor], dst: list[torch.Tensor], pairs: list[tuple[int, int]]) -> None:
        if pairs:
            source, target = (torch.tensor(side) for side in zip(*pairs, strict=True))
            for from_cache, to_cache in zip(src, dst, strict=True):
                to_cache[target] = from_cache[source].to(to_cache.dtype)


def _attend(
    query_QHD: torch.Tensor, key_LKD: torch.Tensor, value_LKD: torch.Tensor, params: AttentionParams
) -> torch.Tensor:
    """Dense attention of the last Q of L positions, float32."""
    queries, length = query_QHD.shape[0], key_LKD.shape[0]
    ratio = params.num_heads // params.num_kv_heads
    key_LHD, value_LHD = key_LKD.repeat_interleave(ratio, 1), value_LKD.repeat_interleave(ratio, 1)
    scores_HQL = torch.einsum("qhd,lhd->hql", query_QHD, key_LHD) * params.scale
    if params.soft_cap:
        scores_HQL = params.soft_cap * torch.tanh(scores_HQL / params.soft_cap)
    position_Q1 = torch.arange(length - queries, length)[:, None]
    position_L = torch.arange(length)
    if params.alibi_slopes is not None:
        slopes = torch.as_tensor(params.alibi_slopes, dtype=torch.float32)
        scores_HQL = scores_HQL + slopes[:, None, None] * (position_L - position_Q1).float()
    hidden_QL = torch.zeros(queries, length, dtype=torch.bool)
    if params.causal:
        hidden_QL |= position_L > position_Q1
    if params.sliding_window:
        hidden_QL |= position_L <= position_Q1 - params.sliding_window
    scores_HQL = scores_HQL.masked_fill(hidden_QL, float("-inf"))
    if params.sinks is not None:
        sinks = torch.as_tensor(params.sinks, dtype=torch.float32)[:, None, None].expand(-1, queries, 1)
        weights_HQL = torch.softmax(torch.cat([scores_HQL, sinks], -1), -1)[..., :-1]
    else:
        weights_HQL = torch.softmax(scores_HQL, -1)
    return torch.einsum("hql,lhd->qhd", weights_HQL, value_LHD)


class TorchOps(OpTable):
    """No ops of its own: the core's references are the torch path."""

    def get(self, op: str) -> Impl | None:
        return None
