"""Attention that hands a call to another library where that was measured to be faster."""

from __future__ import annotations

import torch
from enginecore.device import AttentionBackend, AttentionMetadata, AttentionParams, Capabilities
from enginecore_triton import DeviceDescription
from enginecore_triton.attention_backend import TritonAttention

from enginecore_cuda.providers import Provider


class ProvidedAttention(TritonAttention):
    """The Triton kernels, with a `Provider` for some of the phases. Cache, layout and verdicts are the kernels'."""

    def __init__(self, device: DeviceDescription, capabilities: Capabilities, providers: dict[str, Provider]) -> None:
        super().__init__(device, capabilities)
        self.providers = providers

    def forward(
        self,
        query_THD: torch.Tensor,
        kv_cache: torch.Tensor,
        metadata: AttentionMetadata,
        params: AttentionParams,
        out_THD: torch.Tensor | None = None,
    ) -> torch.Tensor:
        provider = self.providers.get("decode" if metadata.max_query_len == 1 else "prefill")
        if provider is None or provider.refuses(params, query_THD.dtype) or kv_cache.dtype != query_THD.dtype:
            return super().forward(query_THD, kv_cache, metadata, params, out_THD)
        out = torch.empty_like(query_THD) if out_THD is None else out_THD
        return provider.forward(query_THD, kv_cache, metadata, params, out)


def with_providers(kernels: AttentionBackend, architecture: str) -> AttentionBackend:
    """`kernels`, or the same with providers where some are installed and measured to be faster."""
    from enginecore_cuda.providers import chosen

    if not isinstance(kernels, TritonAttention):
        return kernels
    providers = chosen(architecture)
    return ProvidedAttention(kernels.device, kernels.capabilities, providers) if providers else kernels
