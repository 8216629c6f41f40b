"""The core's ops over a cache of latents: `latent_cache` and `latent_attention`.

    few tokens of each sequence    mla_decode (contexts cut into parts)
    a step with prompts            mla_prefill for them; mla_decode for its single tokens, in the same step

Writing is `reshape_and_cache` with one head of L + R numbers, whose keys and values are one and the same.

Shape suffixes: T tokens, H query heads, W = L + R, L latent.
"""

from __future__ import annotations

import torch
from enginecore.device.attention import AttentionMetadata
from enginecore.device.optable import OpQuery

from enginecore_triton.aot_case import AotCase
from enginecore_triton.device import DeviceDescription
from enginecore_triton.ops import mla_decode as decode
from enginecore_triton.ops.mla_prefill import mla_prefill
from enginecore_triton.ops.paged_decode import MAX_QUERY
from enginecore_triton.ops.reshape_and_cache import reshape_and_cache

#: Smallest sides that matrix instructions take.
_LEAST = 16


def latent_cache(
    rows_TW: torch.Tensor, cache: torch.Tensor, slot_mapping_T: torch.Tensor, *, device: DeviceDescription
) -> None:
    twice = cache[:, None, None].expand(-1, 2, -1, -1, -1)  # both sides are the same memory
    rows_T1W = rows_TW.unsqueeze(1)
    reshape_and_cache(rows_T1W, rows_T1W, twice, slot_mapping_T)


def latent_attention(
    query_THW: torch.Tensor, cache: torch.Tensor, metadata: AttentionMetadata, scale: float, latent: int,
    *, device: DeviceDescription,
) -> torch.Tensor:  # fmt: skip
    """The host waits for nothing: each kernel skips the other's sequences."""
    out_THL = query_THW.new_empty(*query_THW.shape[:2], latent)
    if metadata.max_query_len <= MAX_QUERY:
        return decode.mla_decode(query_THW, cache, metadata, scale, latent, out_THL, device=device)
    alone = metadata.seq_lens.shape[0] == 1
    mla_prefill(query_THW, cache, metadata, scale, out_THL, 1 if alone else 2, device=device)
    if not alone:
        decode.mla_decode(query_THW, cache, metadata, scale, latent, out_THL, queries=1, device=device)
    return out_THL


def supports(query: OpQuery, device: DeviceDescription) -> list[str]:
    """Sizes are powers of two: a row is read in two pieces of these."""
    sizes = {name: int(query.attributes.get(name, _LEAST)) for name in ("latent", "rope")}
    reasons = [
        f"{name} is {size}, not a power of two of at least {_LEAST}"
        for name, size in sizes.items()
        if size < _LEAST or size & (size - 1)
    ]
    return reasons + decode.supports(query, device)


def aot_cases() -> list[AotCase]:
    """None of its own: those of the modules that it calls."""
    return []
