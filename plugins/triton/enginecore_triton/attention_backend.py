"""The contract's attention over the Triton kernels.

    a step of single tokens     paged_decode (context cut into parts) and merge_parts
    a step with prompts         paged_prefill for them; paged_decode for its single tokens, in the same step
    neither knows the lengths on the host, so nothing waits for the device; each skips the other's sequences

Cache of one attention call: [blocks, 2, K, block_size, D]; int8 has its scales behind the codes: [blocks, 2, K,
block_size * (D + 4)].

Shape suffixes: T tokens, H query heads, K key-value heads, D head size.
"""

from __future__ import annotations

import copy

import torch
from enginecore.device.attention import AttentionBackend, AttentionMetadata, AttentionParams
from enginecore.device.capabilities import AttentionQuery, Capabilities, Verdict, check_attention
from enginecore.device.memory import KVCacheLayout, KVCacheSpec
from enginecore.errors import UnsupportedError

from enginecore_triton.device import DeviceDescription
from enginecore_triton.launch import power_of_two
from enginecore_triton.ops import blocks
from enginecore_triton.ops._call import make_call
from enginecore_triton.ops.pack_linear import SCHEMES
from enginecore_triton.ops.paged_decode import MAX_QUERY, paged_decode
from enginecore_triton.ops.paged_prefill import paged_prefill
from enginecore_triton.ops.reshape_and_cache import reshape_and_cache

__all__ = ["TRITON_CAPABILITIES", "TritonAttention"]

_FP8 = frozenset({"float8_e4m3fn", "float8_e5m2"})
#: Numbers in a tile of queries (tokens x grouped heads x head size) up to which several tokens are decoded at once.
_MOST_QUERIES = 64 * 128

#: What the kernels compute. A plugin claims all of it, or less.
TRITON_CAPABILITIES = Capabilities(
    dtypes=frozenset({"float32", "bfloat16", "float16"}),
    kv_dtypes=frozenset({"float32", "bfloat16", "float16", "int8"}) | _FP8,
    block_sizes=frozenset({8, 16, 32, 64, 128}),
    head_size_range=(16, 256, 1),
    max_gqa_ratio=128,
    features=frozenset({"sliding_window", "soft_cap", "sinks", "alibi", "non_causal"}),
    quantizations=SCHEMES,
)


class TritonAttention(AttentionBackend):
    """`capabilities` is what the plugin claims. `key_scales`, `value_scales` (float32, one a key-value head, or one in
    all) are for fp8 caches; without them the scale is 1 (`with_kv_scales`: for a layer that has its own). A verdict is
    `unverified` unless `verified` says that these kernels passed the conformance kit on this architecture.
    """

    def __init__(
        self, device: DeviceDescription, capabilities: Capabilities | None = None, *, verified: bool = False,
        key_scales: torch.Tensor | None = None, value_scales: torch.Tensor | None = None,
    ) -> None:  # fmt: skip
        self.device = device
        self.capabilities = capabilities or TRITON_CAPABILITIES
        self._verified = verified
        self._scales = (key_scales, value_scales)
        self._ready_scales: dict[tuple[int, torch.device], tuple[torch.Tensor, torch.Tensor]] = {}

    def supports(self, query: AttentionQuery) -> Verdict:
        reasons = check_attention(self.capabilities, query)
        if query.block_size & (query.block_size - 1):
            reasons.append(f"block size {query.block_size} is not a power of two")
        if query.kv_dtype == "int8" and query.head_size % 4:
            reasons.append(f"an int8 KV cache needs a head size that is a multiple of 4, got {query.head_size}")
        return Verdict.of(reasons, verified=self._verified)

    def kv_cache_layout(self, spec: KVCacheSpec) -> KVCacheLayout:
        if spec.dtype == "int8":
            shape: tuple[int, ...] = (-1, 2, spec.num_kv_heads, spec.block_size * (spec.head_size + 4))
        else:
            shape = (-1, 2, spec.num_kv_heads, spec.block_size, spec.head_size)
        page = getattr(torch, spec.dtype).itemsize
        for extent in shape[1:]:
            page *= extent
        return KVCacheLayout(shape=shape, dtype=spec.dtype, page_bytes=page)

    def with_kv_scales(self, key_scales_K: torch.Tensor, value_scales_K: torch.Tensor) -> TritonAttention:
        scaled = copy.copy(self)
        scaled._scales, scaled._ready_scales = (key_scales_K, value_scales_K), {}
        return scaled

    def build_metadata(self, common: AttentionMetadata) -> AttentionMetadata:
        return common

    def reshape_and_cache(
        self, key_TKD: torch.Tensor, value_TKD: torch.Tensor, kv_cache: torch.Tensor, slot_mapping_T: torch.Tensor
    ) -> None:
        reshape_and_cache(
            key_TKD, value_TKD, kv_cache, slot_mapping_T, *self._scales_for(kv_cache, key_TKD.shape[1])
        )  # fmt: skip

    def forward(
        self,
        query_THD: torch.Tensor,
        kv_cache: torch.Tensor,
        metadata: AttentionMetadata,
        params: AttentionParams,
        out_THD: torch.Tensor | None = None,
    ) -> torch.Tensor:
        out = torch.empty_like(query_THD, memory_format=torch.contiguous_format) if out_THD is None else out_THD
        if not query_THD.shape[0] or not metadata.seq_lens.shape[0]:
            return out
        if out.stride(-1) != 1:
            raise UnsupportedError("out_THD must be contiguous over the head size")
        self._attend(query_THD, kv_cache, metadata, params, out)
        return out

    def _attend(
        self, query: torch.Tensor, kv_cache: torch.Tensor, metadata: AttentionMetadata, params: AttentionParams,
        out: torch.Tensor,
    ) -> None:  # fmt: skip
        scales = self._scales_for(kv_cache, params.num_kv_heads)
        call = make_call(query, kv_cache, metadata, params, *scales)
        queries, group = power_of_two(metadata.max_query_len), params.num_heads // params.num_kv_heads
        if queries == 1 or (queries <= MAX_QUERY and queries * group * call.block_d <= _MOST_QUERIES):
            paged_decode(call, out, queries, device=self.device)
        elif call.num_seqs == 1:
            paged_prefill(call, out, 1, device=self.device)
        else:
            paged_prefill(call, out, 2, device=self.device)
            paged_decode(call, out, 1, device=self.device)

    def copy_blocks(self, caches: list[torch.Tensor], pairs: list[tuple[int, int]]) -> None:
        blocks.copy_blocks(caches, pairs)

    def swap_blocks(self, src: list[torch.Tensor], dst: list[torch.Tensor], pairs: list[tuple[int, int]]) -> None:
        blocks.swap_blocks(src, dst, pairs)

    def _scales_for(self, kv_cache: torch.Tensor, kv_heads: int) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """One float32 a head for keys and values of an fp8 cache, made once; none for other dtypes."""
        if str(kv_cache.dtype).removeprefix("torch.") not in _FP8:
            return None, None
        key = (kv_heads, kv_cache.device)
        if key not in self._ready_scales:
            self._ready_scales[key] = (
                _one_a_head(self._scales[0], kv_heads, kv_cache.device),
                _one_a_head(self._scales[1], kv_heads, kv_cache.device),
            )
        return self._ready_scales[key]


def _one_a_head(scales: torch.Tensor | None, kv_heads: int, device: torch.device) -> torch.Tensor:
    if scales is None:
        return torch.ones(kv_heads, dtype=torch.float32, device=device)
    return scales.to(device=device, dtype=torch.float32).reshape(-1).expand(kv_heads).contiguous()
