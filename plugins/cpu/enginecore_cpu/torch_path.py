"""The backend's required parts in plain torch, for installations without the compiled kernels.

Correct, not fast: the doctor says that these run. They are the core's own, with the check of slots and the caches of
bytes that the kernels have.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from enginecore.device.attention import AttentionMetadata, AttentionParams
from enginecore.device.capabilities import Capabilities
from enginecore.device.memory import KVCacheLayout, KVCacheSpec
from enginecore.ops import torch_backend

#: Ranks that gloo joins; they share the host's processors.
MAX_WORLD_SIZE = 64
#: Caches of bytes, which go with activations of every dtype.
BYTE_DTYPES = frozenset({"int8", "float8_e4m3fn", "float8_e5m2"})
_SCALE_BYTES = 4


def torch_capabilities() -> Capabilities:
    return replace(
        torch_backend.TORCH_CAPABILITIES,
        kv_dtypes=torch_backend.TORCH_CAPABILITIES.kv_dtypes | BYTE_DTYPES,
        unified_memory=True,
        per_process_accounting=True,
        max_world_size=MAX_WORLD_SIZE,
        ranks_share_device=True,
    )


class TorchAttention(torch_backend.TorchAttention):
    """The core's, over caches of bytes, too: [blocks, 2, block_size, K, D] of 8-bit floats, or [blocks, 2, block_size,
    K, D + 4] of int8, whose last four bytes are the scale (float32) of a token and head. Refuses slots outside the
    cache with their number.
    """

    def kv_cache_layout(self, spec: KVCacheSpec) -> KVCacheLayout:
        plain = super().kv_cache_layout(spec)
        if spec.dtype != "int8":
            return plain
        shape = (*plain.shape[:-1], spec.head_size + _SCALE_BYTES)
        return KVCacheLayout(shape=shape, dtype="int8", page_bytes=math.prod(shape[1:]))

    def reshape_and_cache(
        self, key_TKD: torch.Tensor, value_TKD: torch.Tensor, kv_cache: torch.Tensor, slot_mapping_T: torch.Tensor
    ) -> None:
        num_slots = kv_cache.shape[0] * kv_cache.shape[2]
        if slot_mapping_T.numel() and int(slot_mapping_T.max()) >= num_slots:
            raise ValueError(f"slot {int(slot_mapping_T.max())} is outside the cache of {num_slots} slots")
        if kv_cache.element_size() > 1:
            return super().reshape_and_cache(key_TKD, value_TKD, kv_cache, slot_mapping_T)
        key_TKD, value_TKD = (_to_bytes(side, kv_cache.dtype) for side in (key_TKD, value_TKD))
        super().reshape_and_cache(key_TKD, value_TKD, kv_cache.view(torch.uint8), slot_mapping_T)

    def forward(
        self,
        query_THD: torch.Tensor,
        kv_cache: torch.Tensor,
        metadata: AttentionMetadata,
        params: AttentionParams,
        out_THD: torch.Tensor | None = None,
    ) -> torch.Tensor:
        if kv_cache.element_size() > 1:
            return super().forward(query_THD, kv_cache, metadata, params, out_THD)
        used, table = _used_blocks(metadata, kv_cache.shape[2])
        numbers = _to_float(kv_cache.view(torch.uint8)[used], kv_cache.dtype)
        return super().forward(query_THD, numbers, replace(metadata, block_table=table), params, out_THD)

    def copy_blocks(self, caches: list[torch.Tensor], pairs: list[tuple[int, int]]) -> None:
        super().copy_blocks([_movable(cache) for cache in caches], pairs)

    def swap_blocks(self, src: list[torch.Tensor], dst: list[torch.Tensor], pairs: list[tuple[int, int]]) -> None:
        super().swap_blocks([_movable(cache) for cache in src], [_movable(cache) for cache in dst], pairs)


def _movable(cache: torch.Tensor) -> torch.Tensor:
    """torch does not index 8-bit floats everywhere; their bytes it does."""
    return cache if cache.element_size() > 1 else cache.view(torch.uint8)


def _used_blocks(metadata: AttentionMetadata, block_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(blocks that the step reads, the table by their places among those)."""
    table = metadata.block_table.long()
    needed = (metadata.seq_lens.long() + block_size - 1) // block_size
    valid = torch.arange(table.shape[1])[None, :] < needed[:, None]
    used, places = torch.unique(table[: len(needed)][valid], return_inverse=True)
    renamed = torch.zeros(len(needed), table.shape[1], dtype=torch.int32)
    renamed[valid] = places.int()
    return used, renamed


def _to_bytes(x_TKD: torch.Tensor, kv_dtype: torch.dtype) -> torch.Tensor:
    """Keys or values as the bytes of their slots: [T, K, D], or [T, K, D + 4] for int8."""
    x_TKD = x_TKD.float()
    if kv_dtype != torch.int8:
        largest = torch.finfo(kv_dtype).max
        return x_TKD.clamp(-largest, largest).to(kv_dtype).view(torch.uint8)
    scale_TK1 = x_TKD.abs().amax(-1, keepdim=True) * (1 / 127)
    codes_TKD = torch.round(x_TKD / torch.where(scale_TK1 > 0, scale_TK1, 1.0)).nan_to_num(0.0).clamp(-127, 127)
    return torch.cat([codes_TKD.to(torch.int8).view(torch.uint8), scale_TK1.contiguous().view(torch.uint8)], -1)


def _to_float(bytes_BSKD: torch.Tensor, kv_dtype: torch.dtype) -> torch.Tensor:
    if kv_dtype != torch.int8:
        return bytes_BSKD.view(kv_dtype).float()
    codes, scales = bytes_BSKD[..., :-_SCALE_BYTES].view(torch.int8), bytes_BSKD[..., -_SCALE_BYTES:].contiguous()
    return codes.float() * scales.view(torch.float32)
