"""How the caches of a model's attention calls lie in memory: as the device's attention wants them, or, for latents, as
the ops `latent_cache` and `latent_attention` say."""

from __future__ import annotations

from typing import TYPE_CHECKING

from enginecore.device.memory import KVCacheLayout, KVCacheSpec

if TYPE_CHECKING:
    from enginecore.device.attention import AttentionBackend

#: `KVCacheSpec.kind` of caches of latents.
LATENT = "latent"


def layout_of(attention: AttentionBackend, spec: KVCacheSpec) -> KVCacheLayout:
    """The layout of one call's cache."""
    if spec.kind != LATENT:
        return attention.kv_cache_layout(spec)
    import torch

    page = spec.block_size * spec.head_size * getattr(torch, spec.dtype).itemsize
    return KVCacheLayout(shape=(-1, spec.block_size, spec.head_size), dtype=spec.dtype, page_bytes=page)
